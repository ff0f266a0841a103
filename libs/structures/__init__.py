"""The forms that answers are held to: from a client's JSON schema, regular expression, choice or grammar to
the tokens that may come next.

Owns what a spec may be (`grammar`), its compiling within bounds (`compiler`) and the state of one answer
(`matcher`). The gateway compiles a spec to refuse it before anything is placed, instances compile it to hold
answers to it: both run this code on the same tokenizer, so what the one lets through the others take. Knows
neither requests nor logits, and no torch.
"""
