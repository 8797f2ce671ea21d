"""Prompt files: what is read, and that each mistake is named with its file and line."""

import pytest

from sage_fast.run.prompt_files import read_prompts

READ = {
    "csv-in-any-order": (
        "p.csv",
        "seed,prompt,index\n7,a red circle,10\n\n,a blue square,4\n",
        [("a red circle", 10, 7), ("a blue square", 4, None)],
    ),
    "csv-of-any-editor": (
        "p.CSV",
        '\ufeffPrompt , source\r\n"a sign of ""STOP, now""",x\r\n"two\nlines",\r\n一只猫在雪地里奔跑,z\r\n,\r\n',
        [('a sign of "STOP, now"', 0, None), ("two\nlines", 1, None), ("一只猫在雪地里奔跑", 2, None)],
    ),
    "jsonl": (
        "p.jsonl",
        '\ufeff{"prompt": "a", "index": 3, "seed": 0}\n\n"b\u2028c"\n{"prompt": "d", "style": 1}',
        [("a", 3, 0), ("b\u2028c", 1, None), ("d", 2, None)],
    ),
    "txt": ("p.txt", '\ufeffa "quoted", thing\r\n\r\n  猫 \n', [('a "quoted", thing', 0, None), ("猫", 1, None)]),
}


@pytest.mark.parametrize(("name", "content", "expected"), READ.values(), ids=READ.keys())
def test_what_is_read(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content.encode())
    assert [(p.text, p.index, p.seed) for p in read_prompts(tmp_path / name)] == expected


MISTAKES = {
    "no-prompt-column": ("p.csv", "text,id\na,1\n", r"p\.csv:1: .*'prompt', found 'text', 'id'"),
    "empty-prompt-cell": ("p.csv", "prompt,index\na,0\n  ,1\n", r"p\.csv:3: the prompt is empty"),
    "duplicate-index": ("p.csv", "prompt,index\na,5\nb,5\n", r"p\.csv:3: index 5 is taken by line 2"),
    "seed-too-large": ("p.csv", f"prompt,seed\na,{2**63}\n", r"p\.csv:2: seed"),
    "unquoted-comma": ("p.csv", "prompt,seed\na cat, running, fast\n", r"p\.csv:2: 3 cells.*double quotes"),
    "stray-quote": ("p.csv", 'prompt\nok\n"a"b\n', r"p\.csv:3: not valid CSV"),
    "row-after-a-long-cell": ("p.csv", 'prompt,index\n"a\nb",0\nc,z\n', r"p\.csv:4: index"),
    "header-only": ("p.csv", "prompt\n", r"p\.csv: holds no prompts"),
    "bad-json": ("p.jsonl", '"a"\n{"prompt": }\n', r"p\.jsonl:2: not valid JSON"),
    "json-too-deep": ("p.jsonl", "[" * 200_000 + "\n", r"p\.jsonl:1: nested too deep"),
    "json-without-prompt": ("p.jsonl", '{"text": "a"}\n', r"p\.jsonl:1: .*'prompt'; found 'text'"),
    "json-prompt-not-text": ("p.jsonl", '{"prompt": 3}\n', r"p\.jsonl:1: 'prompt' must be a string, not 3"),
    "not-utf8": ("p.txt", b"ok\ncaf\xe9\n", r"p\.txt:2: not UTF-8 \(byte 0xe9\)"),
    "unknown-extension": ("p.tsv", "prompt\na\n", r"ends in \.csv, \.jsonl, \.txt, not in '\.tsv'"),
}


@pytest.mark.parametrize(("name", "content", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named_with_file_and_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(str(path))
