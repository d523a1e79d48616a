# Sourced by the other scripts: makes .venv in the checkout, installs ikpy (editable, with the native modules) and
# activates it. Arguments: extras, e.g. "dev", or "".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "ikpy needs Python 3.10 or newer ($("$python" --version) found); set PYTHON" >&2
    exit 1
}

pip_install() {
    python -m pip install --quiet --disable-pip-version-check "$@" || {
        echo "pip failed; without a network: scripts/test_cuda wheels on another machine, then PIP_NO_INDEX=1 PIP_FIND_LINKS=wheelhouse" >&2
        exit 1
    }
}

# Ends the script where the native modules cannot be compiled.
need_compiler() {
    command -v "${CXX:-g++}" >/dev/null || {
        echo "ikpy needs a C++17 compiler: apt install g++ (or set CXX)" >&2
        exit 1
    }

    "$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || {
        echo "ikpy needs Python's headers (Python.h is not found): apt install python3-dev" >&2
        exit 1
    }
}

setup_venv() {
    local extras=$1
    need_compiler
    [ -x .venv/bin/python ] || "$python" -m venv .venv || {
        echo "no virtual environment can be made: apt install python3-venv" >&2
        exit 1
    }
    # shellcheck disable=SC1091
    . .venv/bin/activate
    pip_install --upgrade "setuptools>=77" wheel "cython>=3.1"
    pip_install --no-build-isolation --editable ".${extras:+[$extras]}"
}
