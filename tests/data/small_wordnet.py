"""A WordNet of fourteen synsets, written for tests in the format of the real one."""

SYNSETS = {
    # name: (part of speech, words, pointers, gloss)
    "dog": ("n", ["dog", "hound"], [("@", "animal"), ("%p", "tail"), ("#m", "pack")], "a pet; \"she has a dog\""),
    "animal": ("n", ["animal"], [("=", "alive")], "a living being"),
    "tail": ("n", ["tail"], [("#p", "dog")], "the rear part of an animal"),
    "pack": ("n", ["pack"], [("%m", "dog")], "a group of animals"),
    "knife": ("n", ["knife"], [("@", "tool"), ("%s", "steel")], 
              "a blade with a handle, used for cutting; used to spread butter"),
    "tool": ("n", ["hand_tool", "tool"], [], "an implement used as a help (in work)"),
    "steel": ("n", ["steel"], [], "an alloy of iron"),
    "run": ("v", ["run"], [], "move fast"),
    "a run": ("n", ["run"], [], "a score in baseball"),
    "lose": ("v", ["lose"], [], "fail to keep"),
    "alive": ("a", ["alive"], [], "possessing life"),
    "child": ("n", ["child"], [], "a young person"),
    "haven": ("n", ["haven"], [], "a shelter"),
    "sum": ("n", ["sum"], [], "an amount of money"),
}  # fmt: skip
TAGGED = {"dog": 42, "animal": 30, "tail": 5, "pack": 4, "knife": 9, "tool": 3, "steel": 2, "run": 106, "a run": 17,
          "lose": 60, "alive": 20, "child": 200, "haven": 2, "sum": 17}  # fmt: skip
FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
DIGITS = {"n": 1, "v": 2, "a": 3, "r": 4}
LICENCE = "  1 This is a small database that was written for tests.  \n"


def write(folder):
    """Writes the files; what they say is SYNSETS."""
    folder.mkdir(exist_ok=True)
    offsets = dict.fromkeys(SYNSETS, 0)
    for _ in range(2):  # offsets have eight digits, so that a second pass knows them all
        texts = dict.fromkeys(FILES, LICENCE)
        for name, (part, words, pointers, gloss) in SYNSETS.items():
            offsets[name] = len(texts[part].encode())
            links = "".join(f" {symbol} {offsets[to]:08d} {SYNSETS[to][0]} 0000" for symbol, to in pointers)
            listed = " ".join(f"{word} 0" for word in words)
            head = f"{offsets[name]:08d} 05 {part} {len(words):02x} {listed} {len(pointers):03d}{links}"
            texts[part] += f"{head} | {gloss}  \n"
    senses = []
    for part, file in FILES.items():
        (folder / f"data.{file}").write_text(texts[part])
        lines = {}
        for name, (own, words, pointers, _) in SYNSETS.items():
            for word in words if own == part else ():
                symbols = sorted({symbol for symbol, _ in pointers})
                listed = "".join(f" {symbol}" for symbol in symbols)
                lines[word] = f"{word} {part} 1 {len(symbols)}{listed} 1 1 {offsets[name]:08d}  \n"
                if word == words[0]:
                    senses.append(f"{word}%{DIGITS[part]}:05:00:: 1 {TAGGED[name]}\n")
        (folder / f"index.{file}").write_text(LICENCE + "".join(lines[word] for word in sorted(lines)))
    (folder / "cntlist.rev").write_text("".join(sorted(senses)))
    (folder / "noun.exc").write_text("children child\n")
    (folder / "verb.exc").write_text("lost lose\nran run\n")
    return folder
