# Sourced by the other scripts: makes .venv in the checkout, installs ikpy (editable, with the native modules) and
# activates it. Arguments: extras, e.g. "dev", or "".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "ikpy needs Python 3.10 or newer ($("$python" --version) found); set PYTHON" >&2
    exit 1
}
command -v "${CXX:-g++}" >/dev/null || {
    echo "ikpy needs a C++17 compiler: apt install g++ (or set CXX)" >&2
    exit 1
}

setup_venv() {
    local extras=$1
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # shellcheck disable=SC1091
    . .venv/bin/activate
    python -m pip install --quiet --disable-pip-version-check --upgrade "setuptools>=77" wheel "cython>=3.1"
    python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".${extras:+[$extras]}"
}
