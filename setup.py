"""Hands the build to CMake. Everything that is built is said in CMakeLists.txt; here is only what pip needs to get there.

Environment: FLASH_ONLINE_CUDA (auto, 1, 0; FORCE_CUDA=1 means 1), TORCH_CUDA_ARCH_LIST, FLASH_ONLINE_HEAD_DIMS,
FLASH_ONLINE_PYTHONS, FLASH_ONLINE_TORCH_DIR, CUDA_HOME or CUDA_PATH, CC, CXX, CMAKE_ARGS, MAX_JOBS or
CMAKE_BUILD_PARALLEL_LEVEL, DEBUG=1.
"""

import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
CUDA_FOLDERS = ("CUDA_HOME", "CUDA_PATH")  # environment variables
COMPILER_PACKAGES = "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime"


def site_packages() -> list[Path]:
    """Where packages are installed, seen from inside pip's build isolation too, which hides them from `import`."""
    schemes = [sysconfig.get_paths(), sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_prefix})]
    folders = [*sys.path, *(s[k] for s in schemes for k in ("purelib", "platlib")), site.getusersitepackages()]
    return [Path(f) for f in dict.fromkeys(folders) if f]


def torch_dir() -> Path:
    named = os.environ.get("FLASH_ONLINE_TORCH_DIR")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("torch")
    found = [Path(spec.submodule_search_locations[0])] if spec and spec.submodule_search_locations else []
    older = []
    for folder in dict.fromkeys((*found, *(f / "torch" for f in site_packages()))):
        if (folder / "include/torch/csrc/stable/library.h").is_file():
            if (version := torch_version(folder)) >= OLDEST_TORCH:
                return folder
            older.append(f"{'.'.join(map(str, version))} in {folder}")
    sys.exit(
        f"flash_online: expected torch >= 2.11 for {sys.executable}, got {', '.join(older) or 'none'}. Install it first "
        "(pip install torch), then flash_online again; or name the folder of its Python package in FLASH_ONLINE_TORCH_DIR."
    )


def torch_version(folder: Path) -> tuple[int, int]:
    """(major, minor) of the torch in this folder, from its version.py; of one without it, as of a source build, the oldest."""
    file = folder / "version.py"
    found = re.search(r"__version__\s*=\s*['\"](\d+)\.(\d+)", file.read_text()) if file.is_file() else None
    return (int(found[1]), int(found[2])) if found else OLDEST_TORCH


def find_nvcc() -> str | None:
    for home in CUDA_FOLDERS:
        candidate = Path(os.environ.get(home) or "/nowhere", "bin/nvcc")
        if candidate.is_file():
            return str(candidate)
    packaged = (f / "nvidia/cu13/bin/nvcc" for f in site_packages())
    return shutil.which("nvcc") or next((str(f) for f in packaged if f.is_file()), None)


def check_compiler() -> None:
    """Exits unless there is a C++ compiler, which CMake's own error would name without its version."""
    named = os.environ.get("CXX", "").split()[:1]
    if not any(map(shutil.which, named or ("c++", "g++", "clang++"))):
        got = f"CXX={named[0]}, which is not there" if named else "no c++, g++ or clang++ in PATH"
        sys.exit(f"flash_online: expected a compiler of C++20, such as GCC 12 or newer (CXX names another), got {got}")


def sees_gpu() -> bool:
    """Whether the driver lists a GPU of NVIDIA's."""
    command = shutil.which("nvidia-smi")
    return bool(command) and subprocess.run([command, "-L"], capture_output=True, check=False).stdout.startswith(b"GPU")


def tool(name: str) -> str:
    """A build tool: that of the PyPI package, which an environment that is not activated has outside PATH, else PATH's."""
    package = importlib.import_module(name) if importlib.util.find_spec(name) else None
    packaged = Path(getattr(package, "CMAKE_BIN_DIR", None) or getattr(package, "BIN_DIR", "/nowhere"), name)
    found = str(packaged) if packaged.is_file() else shutil.which(name)
    return found or sys.exit(f"flash_online: {name} is not installed: pip install {name}, or leave out --no-build-isolation")


def announce(lines: list[str]) -> None:
    """A box on the build's output and, since pip hides that, on the terminal if there is one."""
    width = max(map(len, lines))
    bar = "*" * (width + 4)
    box = "\n".join(["", bar, *(f"* {line:<{width}} *" for line in lines), bar, ""])
    print(box, flush=True)
    if not sys.stdout.isatty():
        try:
            Path("/dev/tty").write_text(box)
        except OSError:
            pass


class CMakeBuild(build_ext):
    def run(self):
        check_compiler()
        package = ROOT / "flash_online" if self.inplace else Path(self.build_lib).resolve() / "flash_online"
        cuda = os.environ.get("FLASH_ONLINE_CUDA") or ("1" if os.environ.get("FORCE_CUDA") == "1" else "auto")
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if os.environ.get("DEBUG") == "1" else "Release",
            "FLASH_ONLINE_CUDA": cuda,
            "FLASH_ONLINE_HEAD_DIMS": os.environ.get("FLASH_ONLINE_HEAD_DIMS", "all"),
            "FLASH_ONLINE_TORCH_DIR": torch_dir(),
            "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
            "Python_EXECUTABLE": sys.executable,
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
        }
        nvcc = find_nvcc() if cuda != "0" else None
        if nvcc and cuda == "auto" and not (os.environ.get("TORCH_CUDA_ARCH_LIST") or sees_gpu()):
            options["FLASH_ONLINE_CUDA"] = "0"
            announce(
                [
                    f"flash_online: no GPU is visible, so this build has NO CUDA KERNELS, though there is {nvcc}.",
                    "FLASH_ONLINE_CUDA=1 builds them: about 45 core-minutes for one architecture, for which no GPU is needed.",
                    "TORCH_CUDA_ARCH_LIST, for instance 9.0a, says for which. FLASH_ONLINE_CUDA=0 silences this notice.",
                ]
            )
        elif nvcc:
            options["CMAKE_CUDA_COMPILER"] = nvcc
        elif cuda == "auto":
            options["FLASH_ONLINE_CUDA"] = "0"
            announce(
                [
                    "flash_online: no nvcc found, so this build has NO CUDA KERNELS: it runs on the CPU alone.",
                    *(f"{name} is {os.environ[name]}, which has no bin/nvcc." for name in CUDA_FOLDERS if os.environ.get(name)),
                    "For CUDA, put nvcc (12.8 or newer) in PATH or set CUDA_HOME, or install it from PyPI:",
                    f"  pip install {' '.join(p + '==13.0.*' for p in COMPILER_PACKAGES.split())}",
                    "and build again. FLASH_ONLINE_CUDA=0 asks for this build and silences this notice.",
                ]
            )
        build = ROOT / "build" / sysconfig.get_config_var("SOABI")
        build.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("MAX_JOBS") or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
        with open(build / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two installs at once would write the same objects
            defines = [f"-D{name}={value}" for name, value in options.items()]
            cmake = tool("cmake")
            # What is built follows from the environment alone, not from an earlier build's answers. The objects stay, which
            # `cmake --fresh` would delete.
            (build / "CMakeCache.txt").unlink(missing_ok=True)
            for answers in build.glob("CMakeFiles/[0-9]*"):
                shutil.rmtree(answers)
            configure = [cmake, "-G", "Ninja", "-S", ROOT, "-B", build, *defines]
            self.step([*configure, *shlex.split(os.environ.get("CMAKE_ARGS", ""))])
            self.step([cmake, "--build", build, "-j", jobs])
            self.step([cmake, "--install", build, "--prefix", package])

    @staticmethod
    def step(command):
        print("flash_online:", shlex.join(map(str, command)), flush=True)
        if code := subprocess.run(command, cwd=ROOT).returncode:
            sys.exit(f"flash_online: {command[0]} {command[1]} failed with exit code {code}; its message stands above")

    def get_outputs(self):
        return [*super().get_outputs(), str(Path(self.build_lib, "flash_online/libflash_online.so"))]


class AnyPythonWheel(bdist_wheel):
    """The library knows no Python, and _introspect, which does, may be absent: one wheel per platform serves them all."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


# Before pip fetches anything, and in one line.
if {"dist_info", "editable_wheel", "bdist_wheel", "build_ext"} & set(sys.argv):
    torch_dir()

setup(
    ext_modules=[Extension("flash_online._introspect", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
