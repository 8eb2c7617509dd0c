#!/usr/bin/env bash
# Make a virtual environment with everything installed: env.sh FOLDER MINOR [MINOR ...]
# MINOR are Python versions in order of preference ("3.12 3.11"). Ready environments are kept: a second call is instant.
# PYTHON=/path/to/python overrides the search.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift

works() { # works COMMAND MINOR: runs, is that version, and can make environments
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1
}

find_python() {
    local minor candidate
    for minor in "$@"; do
        # a pyenv shim answers only for versions that are switched on, so its versions are looked at as well
        for candidate in ${PYTHON:-} "python$minor" python3 \
            $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$minor".*/bin/"python$minor" 2>/dev/null | sort -rV) \
            "/usr/local/bin/python$minor" "/opt/homebrew/bin/python$minor"; do
            if works "$candidate" "$minor"; then
                echo "$candidate"
                return
            fi
        done
    done
    echo "No Python $* with venv and ensurepip found; install one, or say which: PYTHON=/path/to/python make ..." >&2
    return 1
}

# What is installed, and how, decides; not the settings of tools, which stand last in pyproject.toml.
stamp="$folder/ready-$({ sed '/^\[tool\.ruff\]/,$d' pyproject.toml; cat setup.py .ci/env.sh; } | cksum | cut -d' ' -f1)"
[ -e "$stamp" ] && exit 0
python=$(find_python "$@")
echo "Setting up $folder with $("$python" --version) (a minute or two, once)"
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check --editable ".[demo,dev]" "torch==2.13.0" 2>&1 |
    { grep -v "is ignored: it is neither a file nor a directory" || true; }
# TransformerEngine's own Python, which tests/support/cpu/te_on_cpu.py runs. Each version has a folder that is on nobody's path.
for version in 2.20.2 2.9.0; do
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --target "$folder/transformer_engine/$version" "transformer_engine==$version" 2>&1 |
        { grep -v "is ignored: it is neither a file nor a directory" || true; }
done
"$folder/bin/python" -c "import megatron.core, megatron_hecate, torch" >/dev/null 2>&1 || {
    echo "Setting up $folder failed: its Python cannot import torch and megatron.core" >&2
    exit 1
}
touch "$stamp"
