"""Prompt files: what is read, and that each mistake is named with its file and line."""

from pathlib import Path

import pytest

from sage_fast.run.prompt_files import read_prompts


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_csv_with_all_columns_in_any_order(tmp_path):
    path = write(tmp_path, "p.csv", "seed,prompt,index\n7,a red circle,10\n\n,a blue square,4\n")
    assert [(p.text, p.index, p.seed) for p in read_prompts(path)] == [
        ("a red circle", 10, 7),
        ("a blue square", 4, None),
    ]


def test_csv_of_any_editor_with_commas_line_breaks_and_other_scripts(tmp_path):
    head = '\ufeffPrompt , source\r\n"a sign that says ""STOP, now""",x\r\n"two\nlines",y\r\n'
    content = f"{head}一只猫在雪地里奔跑,z\r\n,\r\nقطة,\r\n"
    prompts = read_prompts(write(tmp_path, "p.CSV", content))
    assert [p.text for p in prompts] == ['a sign that says "STOP, now"', "two\nlines", "一只猫在雪地里奔跑", "قطة"]
    assert [p.index for p in prompts] == [0, 1, 2, 3]


def test_jsonl_objects_and_strings(tmp_path):
    content = '\ufeff{"prompt": "a", "index": 3, "seed": 0}\n\n"b\u2028c"\n{"prompt": "d", "style": 1}'
    prompts = read_prompts(write(tmp_path, "p.jsonl", content))
    assert [(p.text, p.index, p.seed) for p in prompts] == [("a", 3, 0), ("b\u2028c", 1, None), ("d", 2, None)]


def test_txt_is_one_prompt_a_line(tmp_path):
    prompts = read_prompts(write(tmp_path, "p.txt", '\ufeffa "quoted", thing\r\n\r\n  猫 \n'))
    assert [(p.text, p.index) for p in prompts] == [('a "quoted", thing', 0), ("猫", 1)]


MISTAKES = {
    "no-prompt-column": ("p.csv", "text,id\na,1\n", r"p\.csv:1: .*'prompt', found 'text', 'id'"),
    "prompt-column-twice": ("p.csv", "prompt,prompt\na,b\n", r"p\.csv:1: expected one column named 'prompt'"),
    "empty-prompt-cell": ("p.csv", "prompt,index\na,0\n  ,1\n", r"p\.csv:3: the prompt is empty"),
    "duplicate-index": ("p.csv", "prompt,index\na,5\nb,5\n", r"p\.csv:3: index 5 is taken by line 2"),
    "index-not-integer": ("p.csv", "prompt,index\na,1.5\n", r"p\.csv:2: index .* not '1\.5'"),
    "seed-negative": ("p.csv", "prompt,seed\na,-1\n", r"p\.csv:2: seed .* not '-1'"),
    "seed-too-large": ("p.csv", f"prompt,seed\na,{2**63}\n", r"p\.csv:2: seed"),
    "unquoted-comma": ("p.csv", "prompt,seed\na cat, running, fast\n", r"p\.csv:2: 3 cells.*double quotes"),
    "stray-quote": ("p.csv", 'prompt\nok\n"a"b\n', r"p\.csv:3: not valid CSV"),
    "row-after-a-long-cell": ("p.csv", 'prompt,index\n"a\nb",0\nc,z\n', r"p\.csv:4: index"),
    "header-only": ("p.csv", "prompt\n", r"p\.csv: holds no prompts"),
    "empty-txt": ("p.txt", " \n", r"p\.txt: holds no prompts"),
    "bad-json": ("p.jsonl", '"a"\n{"prompt": }\n', r"p\.jsonl:2: not valid JSON"),
    "json-too-deep": ("p.jsonl", "[" * 200_000 + "\n", r"p\.jsonl:1: nested too deep"),
    "json-without-prompt": ("p.jsonl", '{"text": "a"}\n', r"p\.jsonl:1: .*'prompt'; found 'text'"),
    "json-number": ("p.jsonl", "3\n", r"p\.jsonl:1: expected an object"),
    "json-prompt-not-text": ("p.jsonl", '{"prompt": 3}\n', r"p\.jsonl:1: 'prompt' must be a string, not 3"),
    "json-seed-bool": ("p.jsonl", '{"prompt": "a", "seed": true}\n', r"p\.jsonl:1: seed .* not True"),
    "not-utf8": ("p.txt", b"ok\ncaf\xe9\n", r"p\.txt:2: not UTF-8 \(byte 0xe9\)"),
    "unknown-extension": ("p.tsv", "prompt\na\n", r"ends in \.csv, \.jsonl, \.txt, not in '\.tsv'"),
}


@pytest.mark.parametrize(("name", "content", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named_with_file_and_line(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(str(path))


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.csv: cannot be read .*No such file"):
        read_prompts(tmp_path / "none.csv")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.txt: cannot be read .*[Ii]s a directory"):
        read_prompts(tmp_path / "folder.txt")
