#!/usr/bin/env bash
# tools/make_env.sh DIR: the development environment in DIR, with the versions of constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dir=${1:?usage: tools/make_env.sh DIR}

# Nothing from the caller's own Python may leak into the environment.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Run, not only looked up: pyenv's shims exist for versions that are not selected, and Debian splits
# ensurepip off. megatron-core has wheels for these two versions alone.
usable() {
  "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' \
    >/dev/null 2>&1
}

find_python() {
  local python pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}
  for python in python3.12 python3.13 python3 python \
    "$pyenv"/versions/3.12*/bin/python "$pyenv"/versions/3.13*/bin/python; do
    if usable "$python"; then
      echo "$python"
      return
    fi
  done
  if python=$(uv python find '>=3.12,<3.14' 2>/dev/null) && usable "$python"; then
    echo "$python"
    return
  fi
  return 1
}

if ! { usable "$dir/bin/python" && "$dir/bin/python" -c 'import pip' 2>/dev/null; }; then
  if ! python=$(find_python); then
    echo "megasink needs Python 3.12 or 3.13 with its venv module, and none was found on PATH," \
      "in pyenv or by uv. Install one, for example with 'pyenv install 3.12'," \
      "'uv python install 3.12' or your system's python3.12-venv package, and run make again." >&2
    exit 1
  fi
  "$python" -m venv "$dir"
fi
echo "Installing into $dir; the first time this takes some minutes (torch alone is 5 GB)."
# uv takes a third of pip's time. pip reads its own configuration, such as a mirror, which uv does not.
"$dir/bin/python" -m pip install --quiet --constraint constraints.txt uv
what=(--constraint constraints.txt --editable '.[eval,finetune,gguf,muon,storage]' --group dev)
if ! UV_SYSTEM_CERTS=1 "$dir/bin/uv" pip install --quiet --python "$dir/bin/python" "${what[@]}"; then
  echo "uv failed, as it says above: pip, which reads pip.conf, installs the same." >&2
  "$dir/bin/python" -m pip install --quiet --upgrade 'pip>=25.1' # --group
  "$dir/bin/python" -m pip install --quiet --no-compile "${what[@]}"
fi
