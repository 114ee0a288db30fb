"""Chat templates taken apart: put together again, they give what transformers renders."""

import pytest

from empax.core.config import ConfigError
from empax.data.chat import PLAIN, chat_template

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_LIKE = (
    "{{ bos_token }}{% set day = strftime_now('%Y') %}{% for message in messages %}"
    "<|start|>{{ message['role'] }}<|end|>\n\n"
    "{% if message['role'] == 'system' %}Today: {{ day }}\n{% endif %}{{ message['content'] | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[assistant]"
)


def joined(parts, system, turns):
    """The prompt that the parts make of turns that begin and end with the user's."""
    text = parts.opening + system + parts.first_user
    for place, turn in enumerate(turns):
        text += turn
        if place < len(turns) - 1:
            text += parts.assistant_to_user if place % 2 else parts.user_to_assistant
    return text + parts.answer


@pytest.mark.parametrize("turns", [["Hello."], ["I lost my dog.", "Oh no!", "He was old."]])
@pytest.mark.parametrize("source", [CHATML, LLAMA_LIKE])
def test_parts_make_the_prompt_that_the_template_makes(source, turns):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # The date is fixed on our side; the template's own would change with the day.
    source = source.replace("strftime_now('%Y')", "'2025'")
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"?": 0}, "?")), bos_token="<b>", eos_token="<e>"
    )
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    expected = reference.apply_chat_template(
        [{"role": "system", "content": "Be kind."}, *messages],
        chat_template=source, tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    parts = chat_template(source, bos_token="<b>", eos_token="<e>")
    assert joined(parts, "Be kind.", turns) == expected


def test_a_template_without_a_systems_turn_gets_its_text_in_front_of_the_users():
    parts = chat_template(NO_SYSTEM)
    assert joined(parts, "Be kind.", ["Hello."]) == "[user]Be kind.\n\nHello.[assistant]"


def test_the_date_does_not_change_with_the_day():
    assert "Today: 2025\n" in chat_template(LLAMA_LIKE, bos_token="", eos_token="").opening


@pytest.mark.parametrize(
    ("source", "message"),
    [("{% for %}", "cannot be rendered"), ("{{ messages[1]['content'] }}", "leaves a turn out")],
)
def test_what_is_no_template_of_a_chat_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        chat_template(source)


def test_the_plain_form_names_who_speaks():
    assert (
        joined(PLAIN, "Be kind.", ["Hi.", "Yes?", "I won."])
        == "Be kind.\n\nThey:\nHi.\n\nYou:\nYes?\n\nThey:\nI won.\n\nYou:\n"
    )
