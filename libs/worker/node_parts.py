"""What a node is made of that takes reading and allocating files: its model's facts, its arena and tiers.

Owns how they follow from the settings. Made in a thread, before there is anything that could use them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError
from cluster.messages import ModelInfo
from cluster.service import ServiceContext
from engine.backend import Backend, computes_on_device
from engine.errors import ModelFolderError
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from engine.native.packing import WeightDtype
from kvhash import BLOCK_TOKENS, model_fingerprint
from kvindex.core import Tier
from kvpool import Arena, BlockPool, BlockStore
from kvtransfer import SECRET_BYTES_MIN
from worker.config import WorkerConfig
from worker.pool_tiers import TierSizes, open_tiers, ssd_identity, tier_sizes


@dataclass(frozen=True, slots=True)
class NodeParts:
    model: ModelConfig
    info: ModelInfo
    layout: KVLayout
    sizes: TierSizes
    arena: Arena
    pool: BlockPool
    stores: Mapping[Tier, BlockStore]


def open_parts(context: ServiceContext, config: WorkerConfig) -> NodeParts:
    """Blocks while files are read and allocated: for a thread. Raises ConfigError where a setting does not
    fit the model or is missing."""
    folder = Path(config.model_folder)
    model = _model_config(config, folder)
    layout = KVLayout.of(model, block_tokens=BLOCK_TOKENS, dtype_name=config.dtype)
    own_cache = config.own_cache or computes_on_device(Backend(config.backend), weight_dtype(config))
    sizes = tier_sizes(config, layout.block_bytes, own_cache)
    arena = Arena.create(sizes.arena_blocks, layout.block_bytes)
    info = _model_info(folder, model, config, layout)
    identity = ssd_identity(context.cluster_seed, info.fingerprint, layout)
    pool, stores = open_tiers(config, sizes, arena, identity, context.log)
    return NodeParts(model, info, layout, sizes, arena, pool, stores)


def weight_dtype(config: WorkerConfig) -> WeightDtype:
    return WeightDtype(config.weight_dtype or WeightDtype.FLOAT32)


def _model_config(config: WorkerConfig, folder: Path) -> ModelConfig:
    if not config.model_folder:
        raise ConfigError("model_folder is not set, must be a folder with config.json and safetensors")
    if len(config.cluster_secret.encode()) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"cluster_secret must have at least {SECRET_BYTES_MIN} bytes "
            "(--cluster-secret or MOONPOOL_CLUSTER_SECRET), the same for all instances"
        )
    try:
        return ModelConfig.load(folder)
    except ModelFolderError as error:
        raise ConfigError(f"model_folder: {error}") from error


def _model_info(folder: Path, model: ModelConfig, config: WorkerConfig, layout: KVLayout) -> ModelInfo:
    return ModelInfo(
        name=config.model_name or model.name,
        fingerprint=model_fingerprint(
            folder, config.weight_dtype or config.dtype, config.dtype, BLOCK_TOKENS
        ),
        context_tokens_max=model.context_tokens_max,
        block_tokens=BLOCK_TOKENS,
        block_bytes=layout.block_bytes,
        layers=model.layers,
        dtype=config.dtype,
    )
