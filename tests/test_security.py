"""What SECURITY.md says."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from package import MODULES
from places import ROOT, SYNTHETIC

from lightning_bilevel import OmniglotEpisodes
from lightning_bilevel.__main__ import main

EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
# What runs or unpickles whatever it is given, or writes where an archive says.
FORBIDDEN = {
    *(
        "eval",
        "exec",
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "marshal.loads",
        "shelve.open",
        "os.system",
        "os.popen",
    ),
    *(
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "torch.hub.load",
        "extractall",
        "extract",
        "shutil.unpack_archive",
    ),
}


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", [*MODULES.values(), *EXAMPLES], ids=lambda path: path.stem)
def test_nothing_runs_what_is_in_a_file(path: Path) -> None:
    for call in calls(path):
        name = ast.unparse(call.func)
        assert name not in FORBIDDEN, name
        assert name.rsplit(".", 1)[-1] not in ("extractall", "unpack_archive"), name
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("shell") != "True"
        if name == "torch.load":
            # by the caller's wish in one place, where not saying anything means True
            assert given["weights_only"] == "True" or path.stem == "checkpoints"


@pytest.mark.integration
def test_the_state_of_a_comparison_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return Path.write_text, (tmp_path / "owned", "yes")

    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    content = yaml.safe_load((SYNTHETIC / "ivsp.yaml").read_text())
    content["model"]["init_args"]["n"] = 5
    (tmp_path / "ivsp.yaml").write_text(yaml.safe_dump(content))
    call = [
        "compare",
        str(tmp_path / "ivsp.yaml"),
        "--budget",
        "50ms",
        "--evaluations",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    main(call)
    (tmp_path / "out" / "ivsp" / "result.json").unlink()
    torch.save({"model": Payload()}, tmp_path / "out" / "ivsp" / "last.ckpt")
    main(call)
    assert not (tmp_path / "owned").exists()
    assert (
        "is not a whole checkpoint of tensors and plain values"
        in (tmp_path / "out" / "summary.md").read_text()
    )


def test_an_archive_writes_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "omniglot-py"
    folder.mkdir(parents=True)
    for part in ("images_background", "images_evaluation"):
        with zipfile.ZipFile(folder / f"{part}.zip", "w") as archive:
            archive.writestr("../../../escaped.png", b"x")
            archive.writestr(f"{part}/a/b/huge.png", b"0" * (2 << 20))
    with pytest.raises(Exception, match="cannot identify image"):
        OmniglotEpisodes(str(tmp_path / "data")).load()
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == []


def test_downloads_have_checksums() -> None:
    from torchvision import datasets

    for source in (datasets.MNIST, datasets.FashionMNIST):
        assert all(len(md5) == 32 for _, md5 in source.resources)
    assert all(len(md5) == 32 for md5 in datasets.Omniglot.zips_md5.values())
