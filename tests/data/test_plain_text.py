"""Texts of users hold no control tokens, whatever they look like; other texts get the ids that they always get."""

import pytest
import tokenizers as rust
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from empax.data.bpe import train_bpe
from empax.data.features import SPECIAL_TOKENS
from empax.data.sample import load_dialogues
from empax.data.tokenizers import SubwordTokenizer
from tests.data.small_tokenizers import of_wheel, trained

TEXTS = [turn.text for dialogue in load_dialogues()["train"][:40] for turn in dialogue.utterances]
HARMLESS = [*TEXTS[:20], "", "  two  blanks ", "a\n\nb\t c", "Grüße, 你好 🎉!", "1 < 2 > 0, [a] {b} | c_d", "x" * 50]
TAGS = ("<sentiment:high>", "<speaker>", "<listener>", "<sep>")


def built_in():
    return train_bpe(TEXTS, vocab_size=400, special_tokens=SPECIAL_TOKENS)


def minilm():
    return of_wheel("minilm", *SPECIAL_TOKENS)


def smollm2():
    return of_wheel("smollm2", *TAGS)


def words():
    """A vocabulary of words; the control tokens stand in it like any word."""
    cut = {"normalizer": normalizers.Lowercase(), "splitter": pre_tokenizers.WhitespaceSplit()}
    backend = trained("WordLevel", TEXTS, ["<pad>", "</s>", "[UNK]", *TAGS], **cut)
    return SubwordTokenizer(backend, pad="<pad>", eos="</s>", start="<pad>")


def t5():
    """Unigram: the control tokens are pieces of the vocabulary, and the likeliest of all (score 0)."""
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>", *TAGS]
    backend = trained("Unigram", TEXTS, special, vocab_size=350, normalizer=normalizers.NFKC())
    return SubwordTokenizer(backend, pad="<pad>", eos="</s>", start="<pad>")


def llama():
    """Byte fallback, a blank in front of every text; tags that lack the flag; a merge that makes a control token."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)}
    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyzI</s>", "</", "</s", "</s>", "<|end|>"})
    vocabulary |= {token: 256 + i for i, token in enumerate(letters)}
    merges = [("<", "/"), ("</", "s"), ("</s", ">")]
    backend = rust.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["</s>", "<|end|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("[tool]", normalized=False, lstrip=True)])
    return SubwordTokenizer(backend, pad="</s>", eos="</s>", start="</s>", bos="<|end|>")


def whole_words():
    """Takes a piece whole where the vocabulary has it (Llama 3 from GGUF); control tokens are not declared as added."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: i for i, token in enumerate([*sorted(alphabet), "<s>", "</s>"])}
    backend = rust.Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r"\s"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return SubwordTokenizer(backend, pad="</s>", eos="</s>", start="<s>")


@pytest.fixture(
    scope="module", params=[built_in, minilm, smollm2, words, t5, llama, whole_words], ids=lambda make: make.__name__
)
def tokenizer(request):
    return request.param()


def control_tokens(tokenizer):
    added = {i: token.content for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    return added | {tokenizer.backend.token_to_id(name): name for name in tokenizer.names.values()}


def unknown_id(tokenizer):
    """The id of what a vocabulary lacks: an ordinary emoji has it too."""
    return next((i for i in map(tokenizer.backend.token_to_id, ("[UNK]", "<unk>")) if i is not None), None)


def test_no_text_has_the_id_of_a_control_token(tokenizer):
    controls = control_tokens(tokenizer)
    never = set(controls) - {unknown_id(tokenizer)}
    changes = (str, str.upper, str.lower, str.title, lambda name: name.replace("<", "＜").replace(">", "＞"))
    forms = (lambda name, change=change: change(name) for change in changes)
    names = st.builds(
        lambda form, name: form(name), st.sampled_from(list(forms)), st.sampled_from([*controls.values()])
    )
    between = st.one_of(st.sampled_from(["", " ", "\n", "\t", "\u00a0", "a", "system\n", "▁"]), st.text(max_size=3))

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.tuples(between, names, between), min_size=1, max_size=4))
    def check(parts):
        text = "".join(map("".join, parts)).encode(errors="replace").decode()
        assert never.isdisjoint(tokenizer.encode(text)), text

    check()
    for name in controls.values():
        assert never.isdisjoint(tokenizer.encode(name)), name
        assert never.isdisjoint(tokenizer.encode_batch([f"a {name}", f"{name}b"])[0])


def test_other_texts_get_the_ids_of_the_tokenizer_itself(tokenizer):
    expected = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in HARMLESS]
    assert [tokenizer.encode(text) for text in HARMLESS] == tokenizer.encode_batch(HARMLESS) == expected


def test_frames_are_encoded_as_the_tokenizer_itself_does_in_one_pass_with_the_text_between(tokenizer):
    unknown = unknown_id(tokenizer)
    names = [name for i, name in control_tokens(tokenizer).items() if i != unknown]
    reference = rust.Tokenizer.from_str(tokenizer.backend.to_str())
    declared = {token.content for token in reference.get_added_tokens_decoder().values()}
    reference.add_special_tokens([name for name in names if name not in declared])  # as transformers does
    for first, second in zip(names, names[1:] + names[:1], strict=True):
        before, after = f"{first}user\n", f"{second}\n{first}{second}"
        for text in ("i am so sad", "Grüße", "a"):
            found = tokenizer.encode(tokenizer.mark(before) + text + tokenizer.mark(after))
            assert found == reference.encode(before + text + after, add_special_tokens=False).ids
    attack = tokenizer.encode(tokenizer.mark(names[0]) + f"{names[0]} {tokenizer.names['eos_token']}")
    controls = set(control_tokens(tokenizer)) - {unknown}
    assert [i for i in attack if i in controls] == [tokenizer.backend.token_to_id(names[0])]


def test_blanks_signs_and_words_that_were_added_are_text():
    backend = rust.Tokenizer.from_str(built_in().backend.to_str())
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "::", "covid", "<think>")])
    tokenizer = SubwordTokenizer(backend, pad="<pad>", eos="</s>", start="<s>")
    for text in ("\n\n", "::", "covid"):
        assert tokenizer.encode(f"a{text}b") == backend.encode(f"a{text}b", add_special_tokens=False).ids
        assert backend.token_to_id(text) in tokenizer.encode(f"a{text}b")
    assert backend.token_to_id("<think>") not in tokenizer.encode("a<think>b")


def test_a_control_token_that_the_normalizer_would_change_is_found_in_a_frame():
    backend = rust.Tokenizer.from_str(llama().backend.to_str())
    backend.add_tokens([AddedToken("[Loud]", normalized=True)])
    tokenizer = SubwordTokenizer(backend, pad="</s>", eos="</s>", start="</s>")
    marked = tokenizer.encode("a" + tokenizer.mark("[Loud]") + "b")
    assert marked == [*tokenizer.encode("a"), backend.token_to_id("[Loud]"), *tokenizer.encode("b")]
    assert backend.token_to_id("[Loud]") not in tokenizer.encode("a [Loud] b")


def test_a_frame_does_not_join_with_the_text_to_a_control_token():
    tokenizer = built_in()
    assert tokenizer.sep_id not in tokenizer.encode(tokenizer.mark("<se") + "p>")
    assert tokenizer.mark("no control token") == "no control token"


def test_what_one_tokenizer_marks_means_nothing_to_another():
    one, other = built_in(), built_in()
    assert one.encode(one.mark("<sep>")) == [one.sep_id]
    assert other.sep_id not in other.encode(one.mark("<sep>"))


@pytest.mark.oracle
def test_ids_are_those_of_transformers_that_splits_special_tokens():
    transformers = pytest.importorskip("transformers")
    ours = built_in()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=ours.backend, split_special_tokens=True)
    texts = [*HARMLESS, *(f"hi {name} you" for name in control_tokens(ours).values())]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ours.encode_batch(texts)
