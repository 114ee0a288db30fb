"""Chat templates in every form that folders have them in: as transformers reads them, or named."""

import json
import logging

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.bpe import train_bpe
from empax.data.chat import default_template, read_chat_template
from empax.data.tokenizer_folders import load_tokenizer

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
    assert "chat templates for 'tool_use' alone; texts are read without a template" in caplog.text


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
