"""The build backend of pyproject.toml (PEP 517 and 660): Bazel compiles, this packs.

A wheel holds `bindings/vlscope` with its compiled `_core.so`, and the demo model beside it; built
where nvcc is, also `_cuda.so`, the CUDA kernels. The extension is built for the interpreter that
runs this file, against the torch installed there, or else against the one that the installer put
into its build environment.
"""

import base64
import csv
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bindings" / "vlscope"
BUILT = {"_core.so": ROOT / "build/bin/bindings/_core.so", "_cuda.so": ROOT / "build/bin/core/ops/cuda/_cuda.so"}
PACKED_SUFFIXES = {".html", ".py", ".pyi", ".typed"}
BUILD_REQUIREMENTS = {"torch": "torch==2.11.*", "pybind11": "pybind11==3.1.*"}
WHEEL_DATE = (2020, 1, 1, 0, 0, 0)  # the same files give the same wheel


def get_requires_for_build_wheel(config_settings=None):
    """What the build needs and this interpreter, seen without the installer's isolation, lacks."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return [
        requirement
        for name, requirement in BUILD_REQUIREMENTS.items()
        if subprocess.run([sys.executable, "-c", find, name], env=bare).returncode
    ]


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    files = {f"vlscope/{path}": (PACKAGE / path).read_bytes() for path in _package_files()}
    files |= {f"vlscope/{name}": path.read_bytes() for name, path in _build_extension().items()}
    for path in sorted((ROOT / "demo" / "model").iterdir()):
        files[f"vlscope/demo_model/{path.name}"] = path.read_bytes()
    return _write_wheel(Path(wheel_directory), files)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    for name, path in _build_extension().items():
        shutil.copyfile(path, PACKAGE / name)
    return _write_wheel(Path(wheel_directory), {"_vlscope.pth": f"{PACKAGE.parent}\n".encode()})


def build_sdist(sdist_directory, config_settings=None):
    """The files that git tracks, with the metadata in front."""
    project = _project()
    stem = f"{project['name']}-{project['version']}"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(Path(sdist_directory) / f"{stem}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        metadata = _metadata(project).encode()
        entry = tarfile.TarInfo(f"{stem}/PKG-INFO")
        entry.size = len(metadata)
        archive.addfile(entry, io.BytesIO(metadata))
        for name in filter(None, tracked.decode().split("\0")):
            archive.add(ROOT / name, f"{stem}/{name}")
    return f"{stem}.tar.gz"


def _package_files():
    found = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.suffix in PACKED_SUFFIXES)
    return sorted(path.as_posix() for path in found)


def _build_extension():
    """Runs Bazel and returns the libraries by name, built for this interpreter."""
    if shutil.which("bazel") is None:
        sys.exit("building vlscope needs Bazel and Debian's C++ libraries; ./dev build installs them")
    targets = ["//bindings:_core", "//core/ops/cuda:kernels"]
    subprocess.run(["bazel", "build", *_interpreter_flags(), *targets], cwd=ROOT, check=True)
    return {name: path for name, path in BUILT.items() if path.exists()}


def _interpreter_flags():
    if Path(sys.prefix) == ROOT / ".venv":
        return []  # Bazel's own choice: the same flags as elsewhere keep its analysis
    folders = {Path(spec.origin).parents[1] for spec in map(importlib.util.find_spec, BUILD_REQUIREMENTS) if spec}
    search_path = os.pathsep.join(sorted(map(str, folders)))
    return [f"--repo_env=VLSCOPE_PYTHON={sys.executable}", f"--repo_env=VLSCOPE_PYTHONPATH={search_path}"]


def _project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _metadata(project):
    lines = [
        "Metadata-Version: 2.3",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
        *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"]),
    ]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {requirement} ; extra == '{extra}'" for requirement in requirements]
    lines.append("Description-Content-Type: text/markdown")
    return "\n".join(lines) + "\n\n" + (ROOT / project["readme"]).read_text()


def _entry_points(project):
    scripts = (f"{name} = {target}" for name, target in project["scripts"].items())
    return "\n".join(["[console_scripts]", *scripts, ""])


def _wheel_tag():
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"{python}-{python}-{platform}"


def _write_wheel(folder, files):
    project, tag = _project(), _wheel_tag()
    stem = f"{project['name']}-{project['version']}"
    info = f"{stem}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: vlscope\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = {
        **files,
        f"{info}/METADATA": _metadata(project).encode(),
        f"{info}/WHEEL": wheel.encode(),
        f"{info}/entry_points.txt": _entry_points(project).encode(),
    }
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, WHEEL_DATE)
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return path.name


def _record(files, own_name):
    """The wheel's list of contents: name, SHA-256 in URL-safe base64 without padding, size."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(content)])
    rows.writerow([own_name, "", ""])
    return text.getvalue().encode()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(target / build_wheel(target))
