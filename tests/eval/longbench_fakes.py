"""Records in LongBench's layout with texts of our own, one or more a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_kvpolicy.eval.tasks.longbench_table import LONGBENCH_TASKS

PASSAGE = " ".join(f"House number {index} has {index + 2} windows and a {colour} door." for index, colour in
                   enumerate(["red", "blue", "green", "white", "black", "grey", "brown", "pink"] * 4))  # fmt: skip
PASSAGE_ZH = "".join(f"第{index}间房子有{index + 2}扇窗户。" for index in range(40))
DIALOGUE = "Dialogue: Ann: Tea?\nBen: Yes.\nSummary: Ann offers tea and Ben accepts."
CODE = "def windows(houses):\n    total = 0\n    for house in houses:\n" * 20

# task -> (context, input, answers, all_classes)
_CONTENT: dict[str, tuple[str, str, list[str], list[str] | None]] = {
    "multifieldqa_zh": (PASSAGE_ZH, "第三间房子有几扇窗户？", ["五扇"], None),
    "dureader": (PASSAGE_ZH, "第三间房子有几扇窗户？", ["第三间房子有五扇窗户", "五扇"], None),
    "gov_report": (PASSAGE, "", ["The houses have many windows."], None),
    "multi_news": (PASSAGE, "", ["The houses have many windows."], None),
    "vcsum": (PASSAGE_ZH, "", ["会议讨论了房子和窗户"], None),
    "trec": ("Question: Who built it?\nType: Person\n" * 30, "Question: Where is it?\nType:", ["Place"],
             ["Person", "Place", "Number"]),
    "triviaqa": (f"Passage:\n{PASSAGE}\nQuestion:\nWhich door?\nAnswer:\nred", "Question:\nWhat colour?\nAnswer:",
                 ["Blue", "the blue one"], None),
    "samsum": ("\n".join([DIALOGUE] * 20), "Dialogue: Cem: Late?\nDoris: No.\nSummary: ", ["Doris is on time."], None),
    "lsht": ("新闻：下雨了。\n类别：天气\n" * 30, "新闻：球赛结束了。\n类别：", ["体育"], ["天气", "体育"]),
    "passage_count": ("\n\n".join(f"Paragraph {i}: {PASSAGE[:200]}" for i in (1, 2, 3)), "", ["3"], None),
    "passage_retrieval_en": ("\n\n".join(f"Paragraph {i}: {PASSAGE[:200]}" for i in (1, 2, 3)),
                             "Doors and windows.", ["Paragraph 2"], None),
    "passage_retrieval_zh": ("\n\n".join(f"段落{i}: {PASSAGE_ZH[:99]}" for i in (1, 2, 3)),
                             "门和窗户。", ["段落2"], None),
    "lcc": (CODE, "", ["        total += house.windows"], None),
    "repobench-p": (CODE, CODE[:60], ["        total += house.windows"], None),
}  # fmt: skip


def record(task: str, index: int = 0, **changes: Any) -> dict[str, Any]:
    """One record as LongBench writes it."""
    default = (PASSAGE, "Which door does house number 3 have?", ["a white door", "white"], None)
    context, question, answers, classes = _CONTENT.get(task, default)
    values = {
        "input": question,
        "context": f"{context} ({index})",
        "answers": answers,
        "length": 3000 + 2500 * index,
        "dataset": task,
        "language": "en",
        "all_classes": classes,
        "_id": f"{task}-{index}",
    }
    return {**values, **changes}


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in records), encoding="utf-8")


def write_data(folder: Path, count: int = 4) -> Path:
    """A folder of every task's file, and of LongBench-E's."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, spec in LONGBENCH_TASKS.items():
        for suffix in ("", "_e") if spec.extended else ("",):
            write_records(folder / f"{task}{suffix}.jsonl", [record(task, index) for index in range(count)])
    return folder
