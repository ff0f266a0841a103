"""Where a rendered conversation ends, and what a client may give to the template."""

import msgspec
import pytest
from tests.unit.gateway.chat_templates import CHATML, LLAMA3, QWEN3

from gateway.api.api_errors import ApiError
from gateway.api.parameter_limits import TEMPLATE_VARIABLES_MAX
from gateway.api.request_body import decode_chat, decode_tokenize
from gateway.api.request_types import ChatRequest
from gateway.chat_rendering import TemplateOptions, render_chat, template_options
from gateway.text.chat_template import ChatTemplate

pytestmark = pytest.mark.unit

HELLO = [{"role": "user", "content": "Hello"}]
THINKING = (
    "{{ messages[0].content }}"
    "{% if add_generation_prompt %}|assistant|"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def request_of(**parameters: object) -> ChatRequest:
    return decode_chat(msgspec.json.encode({"model": "tiny", "messages": HELLO, **parameters}))


def rendered(source: str, **parameters: object) -> str:
    request = request_of(**parameters)
    return render_chat(ChatTemplate(source, {}), request.messages, None, template_options(request))


def test_an_answer_begins_unless_it_is_not_wanted() -> None:
    assert rendered(CHATML).endswith("Hello<|im_end|>\n<|im_start|>assistant\n")
    assert rendered(CHATML, add_generation_prompt=True) == rendered(CHATML)
    assert rendered(CHATML, add_generation_prompt=False).endswith("Hello<|im_end|>\n")


@pytest.mark.parametrize("content", ["end", "I say: ", "<|im_end|>", "two\nlines\n", " x", "Hello"])
def test_the_last_message_goes_on(content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    text = rendered(CHATML, messages=messages, continue_final_message=True)
    assert text == f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{content}"


def test_a_template_that_trims_is_gone_on_from_where_the_text_ends() -> None:
    messages = [*HELLO, {"role": "assistant", "content": " As I said, "}]
    text = rendered(LLAMA3, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\nAs I said, ")


def test_the_templates_own_variables() -> None:
    assert rendered(THINKING) == "Hello|assistant|"
    assert rendered(THINKING, chat_template_kwargs={"enable_thinking": False, "other": [1]}) == (
        "Hello|assistant|<think></think>"
    )
    assert rendered(QWEN3).endswith("<|im_start|>assistant\n")
    assert rendered(QWEN3, chat_template_kwargs={"enable_thinking": False}).endswith("\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token"])
def test_what_the_server_gives_cannot_be_given(name: str) -> None:
    with pytest.raises(ApiError, match=f"chat_template_kwargs.{name} is the server's") as caught:
        rendered(CHATML, chat_template_kwargs={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": "x",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
                    },
                ],
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        (
            {"chat_template_kwargs": {f"v{number}": 0 for number in range(TEMPLATE_VARIABLES_MAX + 1)}},
            "chat_template_kwargs",
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)
def test_what_is_wrong_is_named(parameters: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(CHATML, **parameters)
    assert (caught.value.kind.status, caught.value.param) == (400, param)


def test_a_template_that_leaves_out_the_last_message_cannot_go_on() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "x"}]
    with pytest.raises(ApiError, match="leaves out the last message"):
        rendered("{{ messages[0].content }}", messages=messages, continue_final_message=True)


def test_tokenizing_has_the_same_options() -> None:
    body = {"model": "tiny", "messages": HELLO, "add_generation_prompt": False}
    assert template_options(decode_tokenize(msgspec.json.encode(body))) == TemplateOptions(begin_answer=False)
    assert template_options(decode_tokenize(b'{"model": "tiny", "prompt": "x"}')) == TemplateOptions()
