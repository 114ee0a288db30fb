"""The tokenizer of a GGUF file."""

import json
import struct

import gguf
import pytest
import transformers
from tokenizers import Regex, pre_tokenizers

from empax.core.files import DataError
from empax.data.gguf import find_gguf, read_gguf
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.wheels import NAMED
from tests.data import small_tokenizers

TEXTS = [
    "I lost my job today, and it's 12,345 days!",
    "  two  blanks\n\n\nthen   lines\r\n \n",
    "Ça va? naïve — ok 😀 12a3",
]
TEXTS += ["DON'T you'll HE'S", "word", "", "<|end|>hello<|end|>", "a" * 50, "x=1;y=22;z=333;w=4444"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")],
}


def trained(cut):
    """A tokenizer as its tokenizer.json would have it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut != "llama-bpe")
    splitter = pre_tokenizers.Sequence([*CUTS[cut], byte_level])
    backend = small_tokenizers.trained("BPE", TEXTS * 3, ["<|start|>", "<|end|>", "<|pad|>"], splitter=splitter)
    backend.model.ignore_merges = cut == "llama-bpe"
    return backend


def written(file, backend, *, cut="gpt-2", model="gpt2", pad=True, template="{{ messages }}", merges=True, frame=()):
    state = json.loads(backend.to_str())
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda row: row[1])]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    if merges:
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if pad:
        writer.add_pad_token_id(2)
    for name, value in frame:
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", value)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("cut", CUTS)
def test_ids_are_those_of_the_original(tmp_path, cut):
    backend = trained(cut)
    written(tmp_path / "a.gguf", backend, cut=cut)
    for place in (tmp_path, tmp_path / "a.gguf"):
        ours = load_tokenizer(place)
        marked = [ours.mark(text) for text in TEXTS]
        assert ours.encode_batch(marked) == [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
        assert (ours.start_id, ours.eos_id, ours.pad_id) == (0, 1, 2)
        assert ours.vocab_size == backend.get_vocab_size()
        assert ours.chat_template == "{{ messages }}"
    assert ours.decode([*ours.encode("it's ok 12"), ours.eos_id, 50]) == "it's ok 12"


def test_ids_of_a_qwen_are_those_of_its_tokenizer(tmp_path):
    backend = trained("llama-bpe")
    state = json.loads(backend.to_str())["model"]
    theirs = transformers.Qwen2Tokenizer(state["vocab"], [tuple(pair) for pair in state["merges"]], eos_token="<|end|>",
                                         pad_token="<|pad|>", unk_token="<|start|>")  # fmt: skip
    written(tmp_path / "a.gguf", backend, cut="qwen2")
    ours = load_tokenizer(tmp_path)
    for text in (*TEXTS, "Cafe\u0301 12345"):
        assert ours.encode(ours.mark(text)) == theirs.encode(text, add_special_tokens=False), text
    assert ours.encode("e\u0301") == ours.encode("\u00e9")  # composed first
    assert len(ours.encode("12345")) == 5


@pytest.mark.parametrize(
    ("cut", "frame", "expected"),
    [("gpt-2", (), ([], [])), ("llama-bpe", (), ([0], [])), ("llama-bpe", [("bos", False)], ([], [])),
     ("smollm", [("bos", True), ("eos", True)], ([0], [1])), ("gpt-2", [("eos", True)], ([], [1]))],
)  # fmt: skip
def test_a_text_is_framed_as_the_metadata_say_and_else_as_llama_cpp_does(tmp_path, cut, frame, expected):
    written(tmp_path / "a.gguf", trained(cut), cut=cut, frame=frame)
    assert load_tokenizer(tmp_path / "a.gguf").framing == expected


@pytest.mark.parametrize("start", ["$zz", "$A", "$", "x:1"])
def test_a_start_token_may_have_any_text(tmp_path, start):
    backend = small_tokenizers.trained("BPE", TEXTS * 3, [start, "<|end|>", "<|pad|>"])
    written(tmp_path / "a.gguf", backend, frame=[("bos", True), ("eos", True)])
    ours = load_tokenizer(tmp_path / "a.gguf")
    assert ours.framing == ([0], [1])
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").framing == ([0], [1])


def test_without_padding_the_end_of_sequence_pads_and_a_saved_copy_is_the_same(tmp_path):
    written(tmp_path / "a.gguf", trained("smollm"), cut="smollm", pad=False)
    ours = load_tokenizer(tmp_path)
    assert ours.pad_id == ours.eos_id == 1
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode_batch(TEXTS) == ours.encode_batch(TEXTS)
    assert (again.chat_template, again.pad_id, again.start_id) == (ours.chat_template, 1, 0)
    (tmp_path / "saved" / "chat_template.jinja").write_text("a file of its own")
    assert load_tokenizer(tmp_path / "saved").chat_template == "a file of its own"


def test_what_is_missing_is_named(tmp_path):
    file, backend = tmp_path / "a.gguf", trained("gpt-2")
    written(file, backend, model="llama")
    with pytest.raises(DataError, match=r"a tokenizer 'llama'; only 'gpt2'.*tokenizer\.json beside"):
        load_tokenizer(file)
    written(file, backend, cut="tekken")
    with pytest.raises(DataError, match=r"splits text as 'tekken'.*known: gpt-2, smollm, llama-bpe"):
        load_tokenizer(file)
    written(file, backend, merges=False)
    with pytest.raises(DataError, match=r"no tokenizer\.ggml\.merges"):
        load_tokenizer(file)
    written(file, backend, template=None)
    assert load_tokenizer(file).chat_template is None


def test_a_tokenizer_json_beside_the_file_comes_first(tmp_path):
    written(tmp_path / "a.gguf", trained("gpt-2"), model="llama")
    load_source = trained("smollm")
    load_source.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|pad|>", "eos_token": "<|end|>"}))
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == load_source.encode(TEXTS[0], add_special_tokens=False).ids


SMOLLM2 = {  # as transformers writes them
    "I lost my job today, and I don't know what to do.": [
        *(57, 3590, 957, 2288, 1834, 28, 284, 339, 1326, 982, 699, 732, 288, 536, 30)
    ],
    "Ça va? — ok 😀": [142, 225, 81, 46316, 47, 1841, 10907, 40303, 218],
    "  two  blanks\n\n": [216, 827, 216, 45843, 1116],
    "<|im_start|>user\nhello<|im_end|>\n": [1, 4093, 198, 28120, 2, 198],
}


def test_smollm2_by_its_name():
    ours = small_tokenizers.of_wheel("smollm2")
    folder = NAMED["smollm2"]()
    assert ours.encode_batch([ours.mark(text) for text in SMOLLM2]) == list(SMOLLM2.values())
    assert (ours.vocab_size, ours.eos_id, ours.pad_id, ours.start_id) == (49152, 2, 2, 1)
    assert [ours.decode([i]) for i in ours.encode("2024")] == ["2", "0", "2", "4"]
    assert ours.chat_template == read_gguf(find_gguf(folder)).metadata["tokenizer.chat_template"]
    assert "<|im_start|>assistant" in ours.chat_template


def text(content):
    return struct.pack("<Q", len(content)) + content


def tensor_row(name, *shape, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack("<QQ", 0, 2**63), "9223372036854775808 entries of metadata"),
        (struct.pack("<QQ", 2**40, 0), "1099511627776 tensors"),
        (struct.pack("<QQQ", 0, 1, 2**63), "is cut short"),
        (struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 0, 1 << 23), "8388608 items of a list"),
        (struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 23), "8388608 items of a list"),
        (struct.pack("<QQ", 0, 2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)), "'k' twice"),
        (struct.pack("<QQ", 2, 0) + 2 * tensor_row(b"t", 1), "two tensors 't'"),
        (struct.pack("<QQ", 1, 0) + tensor_row(b"t", 1 << 39, 1 << 39), r"the shape \[549755813888, 549755813888\]"),
        (struct.pack("<QQ", 1, 0) + tensor_row(b"t", 0, 1 << 63), "has the shape"),
        (struct.pack("<QQ", 1, 0) + tensor_row(b"t", 1, offset=2**63), "is cut short"),
        (struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<I", 1 << 30), "items of a list"),
    ],
)
def test_no_length_or_shape_is_believed(content, said, tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 3) + content)
    with pytest.raises(DataError, match=said):
        read_gguf(file)
