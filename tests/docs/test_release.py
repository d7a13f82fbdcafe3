"""A release: versions agree, the wheel has what it needs, cards are as the Hub reads them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig

import hf_gradguard
from hf_gradguard.networks import load_network, packaged_networks

ROOT = Path(__file__).resolve().parents[2]
STATING = ("hf_gradguard/__init__.py", "CHANGELOG.md", "CITATION.cff", "SECURITY.md")
pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "hf_gradguard").mkdir()
    for name in STATING:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_version_is_the_same_everywhere(release: ModuleType) -> None:
    assert release.check() == hf_gradguard.__version__


@pytest.mark.parametrize("name", STATING[1:])
def test_a_file_that_was_forgotten_is_named(release: ModuleType, sources: Path, name: str) -> None:
    package = sources / "hf_gradguard" / "__init__.py"
    edit(package, f'"{hf_gradguard.__version__}"', '"9.8.7"')
    for other in STATING[1:]:
        if other != name:
            old = release.stated_versions(sources)[other]
            edit(sources / other, old, "9.8" if other == "SECURITY.md" else "9.8.7")
    with pytest.raises(SystemExit, match=f"9.8.7, but {name} says"):
        release.check(root=sources)


def test_a_tag_is_of_the_version_with_all_its_changes(release: ModuleType, sources: Path) -> None:
    version = hf_gradguard.__version__
    changelog = sources / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    head, _, rest = text.partition("## [Unreleased]")
    changelog.write_text(f"{head}## [Unreleased]\n\n## {rest.partition(chr(10) + '## ')[2]}")
    assert release.check(f"v{version}", sources) == version
    with pytest.raises(SystemExit, match=r"the tag is v0\.0\.1"):
        release.check("v0.0.1", sources)
    edit(changelog, "## [Unreleased]\n", "## [Unreleased]\n\n- Something new.\n")
    with pytest.raises(SystemExit, match="under Unreleased"):
        release.check(f"v{version}", sources)


def test_a_wheel_holds_the_package_and_its_networks(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        described = archive.read(metadata).decode()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"hf_gradguard"}
    for network in packaged_networks():
        assert f"hf_gradguard/model_cards/{network}/model.safetensors" in names
    assert "hf_gradguard/defenses/measured.json" in names
    assert f"Version: {hf_gradguard.__version__}\n" in described
    assert "Project-URL: Source" in described


def test_staged_networks_have_cards_that_the_hub_reads(release: ModuleType, tmp_path: Path) -> None:
    folders = {folder.name: folder for folder in release.stage_hub(tmp_path / "hub")}
    assert {*packaged_networks(), "text_reconstruction"} <= folders.keys()
    for name in packaged_networks():
        card = ModelCard.load(folders[name] / "README.md")  # refuses a malformed model-index
        data = card.data
        assert data.library_name == "hf-gradguard"
        assert data.license == "apache-2.0"
        assert data.datasets
        assert data.model_name == name
        scores = {(r.dataset_type, r.metric_name): r.metric_value for r in data.eval_results}
        assert len(scores) == len(data.eval_results) >= 4
        written = card.content.partition("<!-- figures -->")[2]
        assert all(f"{score:.3f}" in written for score in scores.values())
        assert (
            load_network(folders[name]).config.model_type
            == AutoConfig.from_pretrained(folders[name]).model_type
        )


def test_the_staged_metric_loads_alone(release: ModuleType, tmp_path: Path) -> None:
    evaluate = pytest.importorskip("evaluate")
    release.stage_hub(tmp_path / "hub")
    folder = tmp_path / "hub" / "text_reconstruction"
    metric = evaluate.load(str(folder / "text_reconstruction.py"))
    scores = metric.compute(predictions=["the dog"], references=["the dog barked"])
    assert 0 < scores["token_f1"] < 1
    front = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert front["sdk"] == "static"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_runs_where_nothing_else_is_installed(
    release: ModuleType, tmp_path: Path
) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert release.try_wheel(wheel) == f"gradguard {hf_gradguard.__version__}"
