"""The compatibility page, written from the record of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zoo.laws import FUSED, Lawful
from zoo.special import REASONS

TEMPLATE = Path(__file__).with_suffix(".md")
_DTYPES = {"float64": "", "float32": " These do not run in float64."}
MEANINGS = {
    "verified": "All attention is read, and every call's output rebuilt from it.",
    "unverified": "All attention is read, some of it from a softmax that the model computes by "
    "hand. The probe sees the softmax and that its weights enter a matrix product unchanged. It "
    "cannot recompute the scores, so the output is not checked.",
    "in part": "Some attention is read. The reason names what is not.",
    "not read": "There is attention, and the probe says that it reads none.",
    "attention-free": "No softmax takes part in a matrix product, and the probe says that it saw "
    "no attention. Some of these have attention without a softmax.",
    "caught": "Rows are read wrongly, and the probe says so: status *mismatch*, with the reason.",
    "wrong": "A number or an output differs. None may be here.",
    "not run": "Built, but it did not run on any of the sweep's inputs. This says nothing about "
    "the probe.",
    "not built": "No small configuration that the sweep knows builds it, or it has more than 40 "
    "million parameters. This says nothing about the probe.",
}
DIFFER = (
    "With its default attention, each of these gives another output than with eager attention, "
    "probed or not, for the same weights and input. Each is read as it runs; the maps are compared "
    "in eager only.\n\n"
)
UNDER_A_LAW = (
    "Every model type whose attention is read also ran under {func}`acutance.apply`, including "
    "layers with windows: once with a factor of 1 for all heads, and once with 1.5. The output "
    "with 1.5 is compared with that of the model without a law whose queries were multiplied by "
    "1.5 in the model itself: in the weights and biases of their projection, or in the output of "
    "a normalisation that follows it. Where a query is also used for something else, such as a "
    "position bias, or is not the output of a projection, the keys were multiplied instead.\n\n"
)
OTHERS = (
    "Models of other libraries, examined in the same way: `python benchmarks/sweep.py --library "
    "NAME`. Of diffusers all classes of transformers are examined, of x-transformers each "
    "attention and layer option, one at a time, of torchvision and timm up to two small models of "
    "each module, and of open_clip the configurations that differ when their towers are small. "
    "Models with more than 100 million parameters are left out (40 million for transformers). "
    "*Listed*: some attention is not read, and the probe says which. *Caught*: read wrongly, and "
    "reported. *Wrong*: read wrongly without notice.\n\n"
)
FUSED_HERE = (
    "{fused} of them run PyTorch's fused inference of its own transformer layers, which a probe "
    "turns off: their outputs then differ in the last digits, and they were compared bit by bit "
    "with a plain run in which it is off too."
)
_TITLES = {
    "verified": "Read and verified",
    "unverified": "Read, unverified",
    "in part": "Read in part",
    "not read": "Not read",
    "attention-free": "No softmax attention",
    "caught": "Read wrongly, and caught",
    "wrong": "Wrong",
    "not run": "Not run",
    "not built": "Not built",
}

#: The column in which a verdict on another library's model is counted, where it has another title.
_COLUMNS = {"in part": "listed", "not read": "listed", "caught": "caught"}
_OFFLINE = "needs a tokenizer or configuration from the Hugging Face hub; the sweep runs offline"


def render(record: dict[str, Any], others: dict[str, dict[str, Any]] | None = None) -> str:
    """The page, MyST Markdown.

    Args:
        record: of transformers.
        others: records of other libraries, by name.
    """
    models = list(record["models"].values())
    with_maps = [m for m in models if m.get("maps") and m["verdict"] != "caught"]
    moved = sum(bool(model.get("moved")) for model in models)
    worst = max((model["worst"] for model in with_maps), default=0.0)
    facts = dict(
        **record["versions"],
        examined=len(models),
        registered=record.get("registered", len(models)),
        moved="None moved." if not moved else f"{moved} moved.",
        maps=sum(model["maps"] for model in with_maps),
        with_maps=len(with_maps),
        worst=f"{worst:.2f}",
    )
    text, counts = "", Counter(model["verdict"] for model in models)
    rows = [
        (f"[{_TITLES[v]}](#{_anchor(v)})", counts[v], MEANINGS[v]) for v in _TITLES if counts[v]
    ]
    text += _table(("", "model types", ""), rows)
    for verdict, title in _TITLES.items():
        group = [model for model in models if model["verdict"] == verdict]
        if group:
            text += f"\n## {title}\n\n{_group(verdict, group)}"
    noted = [model for model in models if any("else than" in n for n in model.get("notes", ()))]
    if noted:
        text += "\n## Implementations that differ\n\n"
        text += DIFFER
        text += _table(
            ("model type", "what differs"),
            [(_code(m["model_type"]), "; ".join(m["notes"])) for m in noted],
        )
    laws = {m["model_type"]: Lawful(**m["law"]) for m in models if m.get("law")}
    held = [law for law in laws.values() if not law.refused and not law.fault]
    facts |= {
        "laws": len(laws),
        "held": len(held),
        "read": sum(bool(m.get("read")) for m in models),
    }
    if laws:
        text += f"\n## Under a law\n\n{UNDER_A_LAW}{_laws(laws, held)}"
    text += _libraries(others or {})
    template = TEMPLATE.read_text(encoding="utf-8")
    for name, value in {**facts, "groups": text}.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template


def _libraries(others: dict[str, dict[str, Any]]) -> str:
    """What other libraries' models gave: a row each, and below it what was not verified."""
    if not others:
        return ""
    rows, listed = [], []
    for name, record in others.items():
        models = list(record["models"].values())
        counts = Counter(model["verdict"] for model in models)
        ran = [m for m in models if m["verdict"] not in ("not run", "not built")]
        attends = len(ran) - counts["attention-free"]
        rows.append(
            (f"{name} {record['versions'][name]}", record["registered"], len(models), len(ran),
             attends, counts["verified"], counts["unverified"],
             counts["in part"] + counts["not read"], counts["caught"], counts["wrong"])
        )  # fmt: skip
        listed += [
            (
                name,
                _code(m["model_type"]),
                _COLUMNS.get(m["verdict"], _TITLES[m["verdict"]].lower()),
                _plain(m["reason"]),
            )
            for m in models
            if m["verdict"] not in ("verified", "unverified", "attention-free")
        ]
    names = ("library", "names", "examined", "ran", "with attention", "verified", "unverified",
             "listed", "caught", "wrong")  # fmt: skip
    text = f"\n## Other libraries\n\n{OTHERS}{_table(names, rows)}\n"
    fused = sum(
        FUSED in model.get("notes", ())
        for record in others.values()
        for model in record["models"].values()
    )
    if fused:
        text += f"{FUSED_HERE.format(fused=fused)}\n\n"
    return f"{text}{_table(('library', 'name', '', 'reason'), listed)}"


def _laws(laws: dict[str, Lawful], held: list[Lawful]) -> str:
    """What became of a law on each model type."""
    compared = {kind: [w for w in held if w.agrees and w.dtype == kind] for kind in _DTYPES}
    rows: list[tuple[object, ...]] = [
        ("takes a law", len(held), "With factor 1 all outputs are identical to the bit and every "
         "module that the probe reads is scaled; with 1.5 the outputs change, or the reason is "
         "below.")
    ]  # fmt: skip
    for kind, some in compared.items():
        if some:
            worst = max(law.reference / law.moved for law in some if law.reference is not None)
            keys = sum(law.by == "keys" for law in some)
            rows.append(
                (f"of these, compared in {kind}", len(some), f"The outputs agree with those of the "
                 f"larger queries ({len(some) - keys}) or keys ({keys}): the largest difference is "
                 f"{worst:.0e} of the change by the law.{_DTYPES[kind]}")
            )  # fmt: skip
    groups = {
        "not compared": {name: law.left for name, law in laws.items() if law in held and law.left},
        "refused": {name: law.refused for name, law in laws.items() if law.refused},
        "wrong": {name: law.fault for name, law in laws.items() if law.fault},
    }
    for title, some_of in groups.items():
        rows += [(title, len(some_of), "")] if some_of else []
    text = _table(("", "model types", ""), rows)
    listed = [
        (_code(name), title, _plain(why))
        for title, some_of in groups.items()
        for name, why in some_of.items()
    ]
    return f"{text}\n{_table(('model type', '', 'reason'), listed)}" if listed else text


def _group(verdict: str, models: list[dict[str, Any]]) -> str:
    if verdict in ("not built", "not run"):
        return _table(
            ("model type", "reason"),
            [
                (_code(m["model_type"]), _plain(REASONS.get(m["model_type"], m["reason"])))
                for m in models
            ],
        )
    if verdict == "attention-free":
        rows = [(_code(m["model_type"]), m["model"], _plain(m["reason"])) for m in models]
        return _table(("model type", "class", "remark"), rows)
    names = ("model type", "class", "input", "attention", "calls read", "maps compared")
    if verdict == "verified":
        rows = [(*_row(model), "; ".join(model.get("notes", ()))) for model in models]
        return _table((*names, "remark"), rows)
    return _table(
        (*names, "reason"), [(*_row(m), _plain(m["reason"] or _sources(m))) for m in models]
    )


def _row(model: dict[str, Any]) -> tuple[object, ...]:
    calls = (
        f"{model['read']}"
        if model["read"] >= model["calls"]
        else f"{model['read']} of {model['calls']}"
    )
    return (
        _code(model["model_type"]),
        model["model"],
        model["inputs"],
        ", ".join(model["implementations"]),
        calls,
        model["maps"] or "",
    )


def _sources(model: dict[str, Any]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(model["statuses"].items()))


def _table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(names)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`"


def _plain(text: str) -> str:
    """A reason as text: nothing in it is markup."""
    text = _OFFLINE if "couldn't connect to 'https://huggingface.co'" in text else text
    short = text if len(text) <= 200 else f"{text[:197]}..."
    for mark in "\\`*_{}[]<>|#$~":
        short = short.replace(mark, f"\\{mark}")
    return short


def _anchor(verdict: str) -> str:
    return _TITLES[verdict].lower().replace(",", "").replace(" ", "-")
