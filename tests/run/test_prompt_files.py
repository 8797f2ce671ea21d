"""Prompt files: what is read, and that each mistake is named with its file and line."""

import os
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sage_fast.config.load import load_config
from sage_fast.records import Prompt
from sage_fast.run.prompt_files import load_prompts, prompts_digest, read_prompts

READ = {
    "csv-in-any-order": (
        "p.csv",
        "seed,prompt,index\n7,a red circle,10\n\n,a blue square,4\n",
        [("a red circle", 10, 7), ("a blue square", 4, None)],
    ),
    "csv-of-any-editor": (
        "p.CSV",
        (
            '\ufeffPrompt , source\r\n"a sign of ""STOP, '
            'now""",x\r\n"two\nlines",\r\n一只猫在雪地里奔跑,z\r\n,\r\n'
        ),
        [
            ('a sign of "STOP, now"', 0, None),
            ("two\nlines", 1, None),
            ("一只猫在雪地里奔跑", 2, None),
        ],
    ),
    "csv-with-pictures-inside": (
        "p.csv",
        f"prompt,pixels\na,{'f' * 200_000}\n",
        [("a", 0, None)],
    ),
    "jsonl": (
        "p.jsonl",
        (
            '\ufeff{"prompt": "a", "index": 3, "seed": 0}\n\n"b\u2028c"\n{"prompt": '
            '"d", "style": 1}'
        ),
        [("a", 3, 0), ("b\u2028c", 1, None), ("d", 2, None)],
    ),
    "json": (
        "p.json",
        '[{"prompt": "a", "index": 3},\n {"prompt": null}, {"prompt": "b", "index": null}, "c"]',
        [("a", 3, None), ("b", 1, None), ("c", 2, None)],
    ),
    "json-lines-by-another-name": (
        "p.json",
        '{"prompt": "a"}\n{"prompt": "b"}\n',
        [("a", 0, None), ("b", 1, None)],
    ),
    "array-by-another-name": (
        "p.jsonl",
        '\n [\n"a",\n"b"]',
        [("a", 0, None), ("b", 1, None)],
    ),
    "txt": (
        "p.txt",
        '\ufeffa "quoted", thing\r\n\r\n  猫 \n\rd',
        [('a "quoted", thing', 0, None), ("猫", 1, None), ("d", 2, None)],
    ),
}


@pytest.mark.parametrize(
    ("name", "content", "expected"), READ.values(), ids=READ.keys()
)
def test_what_is_read(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content.encode())
    assert [
        (p.text, p.index, p.seed) for p in read_prompts(tmp_path / name)
    ] == expected


def test_a_picture_lies_beside_the_prompt_file_and_counts_by_its_content(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/fox.png").write_bytes(b"fox")
    texts = {
        "a/p.csv": "Prompt,Image\na fox,fox.png\na cat,\n",
        "p.jsonl": '{"prompt": "a fox", "image": "a/fox.png"}\n"a cat"',
    }
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
    first, second = (read_prompts(tmp_path / name) for name in texts)
    assert first == second and [p.image for p in first] == [
        str(tmp_path / "a/fox.png"),
        None,
    ]
    before = prompts_digest(first, []), prompts_digest([], first[1:])
    (tmp_path / "a/fox.png").write_bytes(b"a wolf")
    assert (
        prompts_digest(first, []) != before[0]
        and prompts_digest([], first[1:]) == before[1]
    )


PICTURED = Prompt(text="a fox", index=3, seed=5, image="fox.png")


@pytest.mark.parametrize(
    "change",
    [
        {"text": "a wolf"},
        {"index": 4},
        {"seed": 6},
        {"seed": None},
        {"image": "wolf.png"},
        {"image": None},
        {"columns": {"count": "2"}},
    ],
    ids=str,
)
def test_the_digest_knows_every_field_of_a_prompt(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {field.name for field in fields(Prompt)} == {
        "text",
        "index",
        "seed",
        "image",
        "columns",
    }
    monkeypatch.chdir(tmp_path)
    for name in ("fox", "wolf"):
        Path(f"{name}.png").write_text(name)
    other = replace(PICTURED, **change)  # type: ignore[arg-type]
    groups = [
        ([prompt], [last]) for prompt in (PICTURED, other) for last in (PICTURED, other)
    ]
    assert len({prompts_digest(*group) for group in groups}) == 4


@pytest.mark.parametrize("changed", ["date", "size", "file"])
def test_a_file_of_which_one_thing_has_changed_is_read_again(
    changed: str, tmp_path: Path
) -> None:
    """An editor may leave the date, as one that writes twice in a tick does, and `mv`
    may leave date and size.
    """
    prompts = tmp_path / "p.txt"
    picture = tmp_path / "a.png"
    others = tmp_path / "others"
    for file in (prompts, picture):
        file.write_text("a fox")
        os.utime(file, ns=(1, 1))
    asked = [replace(PICTURED, image=str(picture))]
    before = prompts_digest(asked, [])
    assert [prompt.text for prompt in read_prompts(prompts)] == ["a fox"]
    for file in (prompts, picture) if changed != "file" else (prompts,):
        others.write_text("a fox, running" if changed == "size" else "a cat")
        if changed == "file":
            others.replace(file)
        else:
            file.write_text(others.read_text())
        os.utime(file, ns=(1, 2 if changed == "date" else 1))
    assert [prompt.text for prompt in read_prompts(prompts)] != ["a fox"]
    assert changed == "file" or prompts_digest(asked, []) != before


MISTAKES = [
    (
        "p.csv",
        "prompt,image\na,b.png\n",
        r":2: there is no picture 'b\.png' in .*rename",
    ),
    (
        "p.csv",
        "text,id\na,1\n",
        r":1: .*'prompt', found 'text', 'id'; .*prompt_key names",
    ),
    ("p.csv", "prompt,prompt\na,b\n", r":1: expected one column"),
    ("p.csv", "prompt;seed\na;1\n", r":1: .*separated by commas"),
    ("p.csv", "prompt,index\n,0\n  ,1\n", r": holds no prompts"),
    ("p.csv", "prompt\n", r": holds no prompts"),
    ("p.csv", "prompt,index\na,5\nb,5\n", r":3: index 5 is taken by .*p\.csv:2;"),
    (
        "p.csv",
        "prompt,index\na,vid_1\n",
        r":2: index .* not 'vid_1'; .*rename the column",
    ),
    ("p.csv", f"prompt,seed\na,{2**63}\n", r":2: seed must be a whole number"),
    ("p.csv", "prompt,seed\na cat, running, fast\n", r":2: more cells.*double quotes"),
    ("p.csv", 'prompt\nok\n"a"b\n', r":3: not valid CSV"),
    ("p.csv", 'prompt,seed\n"a\nb",0\nc,z\n', r":4: seed"),
    ("p.json", '{\n"prompts": ["a"]}', r":1: not valid JSON.*write one array, or"),
    ("p.json", '["a",\n"b"', r":1: not valid JSON .*line 2"),
    ("p.json", '["a", ["b"]]', r":entry 2: expected an object"),
    ("p.jsonl", '"a"\n{"prompt": }\n', r":2: not valid JSON"),
    ("p.jsonl", "[" * 200_000 + "\n", r":1: nested too deep"),
    (
        "p.jsonl",
        '{"text": "a"}\n',
        r":1: .*'prompt'; found 'text'; data.prompt_key names",
    ),
    ("p.jsonl", '{"prompt": 3}\n', r":1: 'prompt' must be a string, not 3"),
    ("p.txt", b"ok\ncaf\xe9\n", r":2: not UTF-8 \(byte 0xe9\)"),
    ("p.tsv", "prompt\na\n", r"ends in \.csv, \.json, \.jsonl, \.txt, not in '\.tsv'"),
]


@pytest.mark.parametrize(("name", "content", "message"), MISTAKES)
def test_mistakes_are_named_with_file_and_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(str(path))


def test_empty_prompts_are_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "p.csv").write_text("prompt,x\na,1\n,2\n ,3\n")
    assert read_prompts(tmp_path / "p.csv") == read_prompts(tmp_path / "p.csv")
    (record,) = caplog.records
    assert re.search(
        r"2 empty prompts were skipped, the first at .*p\.csv:3\.", record.getMessage()
    )


def test_a_list_has_rows_as_a_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fox.png").touch()
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a fox", "image": "fox.png", "seed": 7}, " a cat "]
    first, second = read_prompts(rows)
    assert first == Prompt(
        text="a fox", index=0, seed=7, image=str(tmp_path / "fox.png")
    )
    assert second == Prompt(text="a cat", index=1)
    for row, message in (
        ({"prompt": "a", "image": "b.png"}, "prompt 0: there is no picture"),
        ({"text": "a"}, "a row"),
        (" ", "a prompt is empty"),
        (
            {"prompt": "a", "imgae": "fox.png"},
            "a prompt has imgae; a row of a list has prompt, seed and image",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            read_prompts([row])


def test_the_key_names_the_column_of_training_and_of_evaluation(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "id,Prompt_EN\n1,a red circle moving left\n2,a blue square moving up\n"
    )
    (tmp_path / "b.jsonl").write_text(
        '{"caption": "a red circle moving up"}\n{"caption": "a red circle moving '
        'left"}\n'
    )
    config = load_config(
        "toy_cpu",
        {"data.prompts": str(tmp_path / "a.csv"), "data.prompt_key": "prompt_en"},
    )
    config = replace(
        config, evaluation=replace(config.evaluation, prompts=None, num_prompts=None)
    )
    assert [[p.text for p in group] for group in load_prompts(config)] == [
        ["a red circle moving left", "a blue square moving up"]
    ] * 2
    other = replace(config.evaluation, prompts=str(tmp_path / "b.jsonl"))
    with pytest.raises(
        ValueError,
        match="no key named 'prompt_en'; found 'caption'; data.prompt_key names",
    ):
        load_prompts(replace(config, evaluation=other))
    (tmp_path / "b.jsonl").write_text(
        '{"id": 1, "prompt_en": "a red circle moving up"}\n'
    )
    assert (
        load_prompts(replace(config, evaluation=other))[1][0].text
        == "a red circle moving up"
    )


def test_a_dataset_of_the_hub_is_read_like_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, object]]:
        asked.append((name, split))
        row = {"caption": " a red car ", "seed": 3, "count": "2", "picture": object()}
        return [row, {"caption": None}, {"caption": "a dog"}]

    package = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", package)
    found = read_prompts("hf:them/captions", "caption")
    first = Prompt(text="a red car", index=0, seed=3, columns={"count": "2"})
    assert found == [first, Prompt(text="a dog", index=1)]
    with pytest.raises(
        ValueError, match="hf:them/more:test:row 0: no key named 'promp"
    ):
        read_prompts("hf:them/more:test", "prompt")
    assert asked == [("them/captions", "train"), ("them/more", "test")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="run pip install datasets"):
        read_prompts("hf:them/other")
