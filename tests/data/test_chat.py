"""Chat templates taken apart, and found in every form that folders have them in: as transformers has it, or named."""

import json
import logging
import re

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data import chat
from empax.data.bpe import train_bpe
from empax.data.chat import PLAIN, chat_template, default_template, read_chat_template
from empax.data.tokenizer_folders import load_tokenizer

TURN = "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def each(turn, start="for m in messages"):
    return "{% " + start + " %}" + turn + "{% endfor %}" + ANSWER


EACH = each(TURN)
SKIP = "{% if m.role == 'tool' %}{% continue %}{% endif %}"
END = "{% if loop.index0 > 90 %}{% break %}{% endif %}"
GENERATED = "{% if m.role == 'assistant' %}{% generation %}\n  TURN{%- endgeneration %}{% else %}TURN{% endif %}"
TEMPLATES = {
    "chatml with a default": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "thoughts left out of earlier answers": (
        "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}"
        "{% set index = messages|length - 1 - loop.index0 %}"
        "{% if ns.last < 0 and m.role == 'user' and not m.content.startswith('<tool>') %}{% set ns.last = index %}"
        "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' + m.content }}"
        "{% elif '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}"
        "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{% endif %}"
    ),
    "trimmed": "{{ bos_token }}" + each("\n  [{{ m.role }}]\n\n{{ m.content | trim }}\n"),
    "tools": "{% if tools is not none %}TOOLS {{ tools }}{% endif %}" + EACH,
    "documents": "{% if documents is not none %}DOCUMENTS{% endif %}{% if documents %}!{% endif %}" + EACH,
    "json": "{{ {'a': '<é>'} | tojson }}{{ [1, 2] | tojson(indent=2) }}" + EACH,
    "json, options": "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}"
    + EACH,
    "generation": each(GENERATED.replace("TURN", TURN)),
    "continue": each(SKIP + TURN),
    "break": each(END + TURN),
    "namespace": "{% set ns = namespace(last=-1) %}" + each("{% set ns.last = loop.index0 %}" + TURN),
    "dict": "{% set d = dict(user='U', assistant='A', system='S') %}" + each("{{ d[m.role] }}: {{ m.content }}\n"),
    "macro": "{% macro turn(m) %}" + TURN + "{% endmacro %}" + each("{{ turn(m) }}"),
    "padding": "{{ pad_token }}" + EACH,
    "undefined": "{{ cls_token }}{% if thinking is defined %}THINK{% endif %}" + EACH,
    "escape": each("<|{{ m.role }}|>{{ m.content | e }}"),
    "parts or string": each(
        "<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    ),
    "system last": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}{% for m in turns %}"
        "{% if m.role == 'user' %}[INST] {% if loop.last and system is defined %}{{ system }}\n\n{% endif %}"
        "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
}
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[assistant]"
)
DATED = "{{ strftime_now('%d %B %Y') }}" + EACH
TOKENS = {"bos_token": "<b>", "eos_token": "<e>", "pad_token": "<p>"}
CHATS = (["Hello."], ["I lost my dog.", "Oh no!", "He was old."], ["One <b>?", "Two & 2", "Three", "Four", "Five"])


def joined(parts, system, turns):
    return parts.opened(system) + parts.continued(turns, system)


@pytest.mark.oracle
@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_make_the_prompt_that_transformers_renders(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    parts = chat_template(TEMPLATES[name], **TOKENS)
    assert parts.system_last == (name == "system last")
    for turns in CHATS:
        if name == "escape":
            turns = [re.sub("[&<>]", "", turn) for turn in turns]
        messages = [{"role": ["user", "assistant"][i % 2], "content": turn} for i, turn in enumerate(turns)]
        messages = [{"role": "system", "content": "Be kind."}, *messages]
        options = {"chat_template": TEMPLATES[name], "add_generation_prompt": True, **TOKENS}
        (expected,), _ = render_jinja_template([messages], **options)
        assert joined(parts, "Be kind.", turns) == expected


@pytest.mark.parametrize(
    "source",
    [NO_SYSTEM, "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"],
    ids=["refused", "left out"],
)
def test_a_template_without_a_systems_turn_gets_its_text_in_front_of_the_users(source):
    parts = chat_template(source)
    assert joined(parts, "Be kind.", ["Hello."]) == "[user]Be kind.\n\nHello.[assistant]"
    assert joined(parts, "S", ["1", "2", "3"]) == "[user]S\n\n1[assistant]2[user]3[assistant]"


def test_the_date_does_not_change_with_the_day():
    assert chat_template(DATED, eos_token="").opening.startswith("01 January 2025<")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", r"cannot be rendered: TemplateSyntaxError: .* none \(chat_template.jinja, or else tok"),
        ("{{ messages[1]['content'] }}", "leaves a turn out"),
        ("", "leaves a turn out"),
        (EACH.replace("m.content", "m.content | upper"), "changes one"),
        (EACH.replace("m.content", "m.content | lower"), "changes one"),
        (EACH + "{{ messages[0].content }}", "repeats"),
        (each("{{ loop.length }}{{ m.content }}"), "differently in chats of one, three and five turns"),
        ("{{ 1 + messages }}", "cannot be rendered: TypeError: unsupported operand"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[99].content.missing }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set ns = namespace(_x=1) %}", "SecurityError"),
        ("{% include 'other' %}", "TypeError: no loader"),
        ("{{ raise_exception('not for you') }}", "not for you"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ 'x' * 10**10 }}", "MemoryError"),
        ("{{ 'x' * 10**6 }}" + EACH, "more than 200000 characters"),
        (each("{% set ns.x = ns.x ~ ns.x %}", "set ns = namespace(x='x') %}{% for i in range(99)"), "MemoryError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}", "cannot be rendered|ended"),
    ],
)
def test_what_is_no_template_of_a_chat_is_refused(source, message):
    with pytest.raises(ConfigError, match=f"^template of x .*({message})"):
        chat_template(source, where="template of x")


def test_a_template_that_does_not_end_is_ended(monkeypatch):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(chat, "CPU_SECONDS", 1)
    with pytest.raises(ConfigError, match="x was stopped: it computed more than 1 s"):
        chat_template(endless, where="x")
    monkeypatch.setattr(chat, "CPU_SECONDS", 60)
    monkeypatch.setattr(chat, "WAIT_SECONDS", 1)
    with pytest.raises(ConfigError, match="x was stopped: it took more than 1 s"):
        chat_template(endless, where="x")


def test_a_template_is_rendered_once(monkeypatch):
    first = chat_template(EACH, eos_token="<once>")
    monkeypatch.setattr(chat.subprocess, "run", None)
    assert chat_template(EACH, eos_token="<once>") is first


def test_the_plain_form_names_who_speaks():
    assert (
        joined(PLAIN, "Be kind.", ["Hi.", "Yes?", "I won."])
        == "Be kind.\n\nThey:\nHi.\n\nYou:\nYes?\n\nThey:\nI won.\n\nYou:\n"
    )


CHAT, TOOLS, OTHER = "{{ messages }} chat", "{{ tools }} tools", "{{ messages }} other"
NAMED = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": TOOLS}]


def folder_with(path, *, config=None, files=()):
    train_bpe(["so sad"], vocab_size=270).save(path)
    if config is not None:
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": config}))
    for name, content in files:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("config", "files"),
    [
        (CHAT, ()),
        (NAMED, ()),
        ({"default": CHAT, "rag": TOOLS}, ()),
        (OTHER, [("chat_template.jinja", CHAT)]),
        (NAMED, [("chat_template.jinja", CHAT)]),
        (OTHER, [("chat_template.jinja", CHAT), ("additional_chat_templates/tool_use.jinja", TOOLS)]),
        (None, [("chat_template.jinja", CHAT), ("additional_chat_templates/rag.jinja", TOOLS)]),
        (None, [("additional_chat_templates/default.jinja", CHAT), ("additional_chat_templates/rag.jinja", TOOLS)]),
    ],
    ids=["text", "list", "object", "file", "file-over-list", "folder", "folder-alone", "default-in-folder"],
)
def test_the_template_is_that_of_transformers(config, files, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path, config=config, files=files)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder)).get_chat_template()
    ours = load_tokenizer(folder)
    assert ours.chat_template == theirs == CHAT
    ours.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").chat_template == CHAT


@pytest.mark.parametrize("content", [CHAT, NAMED, {"default": CHAT}])
def test_the_file_of_a_processor_is_read_where_there_is_no_other(content, tmp_path):
    folder = folder_with(tmp_path, files=[("chat_template.json", {"chat_template": content})])
    assert load_tokenizer(folder).chat_template == CHAT
    assert load_tokenizer(folder_with(tmp_path, config=OTHER)).chat_template == OTHER


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ([NAMED[1]], ()),
        ({"tool_use": TOOLS}, ()),
        (OTHER, [("additional_chat_templates/tool_use.jinja", TOOLS)]),  # which transformers takes in its place
    ],
)
def test_templates_without_a_default_are_named(config, files, tmp_path, caplog):
    folder = folder_with(tmp_path, config=config, files=files)
    with caplog.at_level(logging.WARNING, "empax"):
        assert load_tokenizer(folder).chat_template is None
    assert "names its chat templates 'tool_use'; texts are read without a template" in caplog.text


@pytest.mark.parametrize("wrong", [3, [3], [{"name": "default"}], {"default": 3}, [CHAT]])
def test_what_is_no_template_is_refused_by_its_file(wrong, tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: chat_template must be a text, a list"):
        load_tokenizer(folder_with(tmp_path, config=wrong))
    with pytest.raises(DataError, match="there: chat_template must be"):
        default_template(wrong, "there")


def test_an_adapter_may_have_a_template_of_its_own(tmp_path):
    base, adapter = folder_with(tmp_path / "base", config=OTHER), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert load_tokenizer(adapter).chat_template == OTHER
    (adapter / "chat_template.jinja").write_text(CHAT)
    assert load_tokenizer(adapter).chat_template == CHAT


def test_a_tokenizer_that_transformers_has_to_make_keeps_its_template(tmp_path):
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, "s": 3, "o": 4, "so": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\ns o\n")
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": NAMED, **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == CHAT
    assert loaded.encode("so") == [5]


def test_nothing_is_no_template(tmp_path):
    assert read_chat_template(tmp_path) is None
