# shellcheck shell=bash
# Sets up what ./dev needs: Debian's packages, a virtual environment with pinned Python packages,
# and vlscope in it. Sourced by ./dev from the repository root; `set_up` is the entry.

readonly DEBIAN_PACKAGES=(
  bazel-bootstrap bazel-platforms bazel-rules-cc bazel-rules-java bazel-rules-proto bazel-skylib
  g++ libfmt-dev libgmock-dev libgtest-dev libspdlog-dev nlohmann-json3-dev
)
readonly BROWSER=(chromium fonts-dejavu-core) # looks at the pages that docs/ and the package write
readonly DEBIAN_PYTHON=(python3 python3-dev python3-venv)
readonly REQUIREMENTS=third_party/python/requirements.txt
readonly SETUP_DONE=.venv/.set-up

say() { printf 'dev: %s\n' "$*" >&2; }

fail() {
  say "$*"
  exit 1
}

# Runs a command whose output matters only if it fails.
quietly() {
  local output
  output=$("$@" 2>&1) || {
    printf '%s\n' "$output" | tail -n 20 >&2
    return 1
  }
}

missing_packages() {
  local package
  for package in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null) == ii* ]] || printf '%s ' "$package"
  done
}

as_root() {
  if [[ $EUID -eq 0 ]]; then
    "$@"
  else
    sudo "$@"
  fi
}

may_install() {
  [[ $EUID -eq 0 ]] || sudo -n true 2>/dev/null || { [[ -t 0 ]] && sudo true 2>/dev/null; }
}

install_debian_packages() {
  local packages
  read -ra packages <<<"$(missing_packages "$@")"
  [[ ${#packages[@]} -gt 0 ]] || return 0
  may_install || fail "these Debian packages are missing; install them, then run this again: sudo apt-get install ${packages[*]}"
  say "installing Debian packages: ${packages[*]}"
  quietly as_root apt-get -qq update || fail "apt-get update failed (above): is there a network?"
  quietly as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install --yes --no-install-recommends "${packages[@]}" ||
    fail "apt-get could not install these packages (its last words are above)"
}

# Torch and the extension can be built for Python 3.10 to 3.13 with its headers.
is_suitable_python() {
  "$1" - 2>/dev/null <<'END'
import pathlib, sys, sysconfig
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13) and header.exists()))
END
}

have_uv() { command uv --version >/dev/null 2>&1; }

# Without uv on the machine, the Python must be able to install it.
find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if is_suitable_python "$candidate" && { have_uv || "$candidate" -c 'import ensurepip' 2>/dev/null; }; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

create_venv() {
  local python
  python=$(find_python) || {
    install_debian_packages "${DEBIAN_PYTHON[@]}"
    python=$(find_python) ||
      fail "no Python 3.10 to 3.13 with its headers and venv on the PATH: install one, then run this again"
  }
  say "creating .venv with $("$python" --version)"
  quietly "$python" -m venv --clear --without-pip .venv || fail "could not create .venv (above)"
}

# The machine's uv where there is one, else one installed into .venv.
uv() {
  if have_uv; then
    command uv "$@"
  else
    [[ -x .venv/bin/uv ]] ||
      { .venv/bin/python -m ensurepip >/dev/null && .venv/bin/python -m pip install --quiet uv; } || return
    .venv/bin/uv "$@"
  fi
}

install_python_packages() {
  say "installing Python packages into .venv (torch among them: some minutes the first time)"
  quietly uv pip install --quiet --python .venv/bin/python --requirement "$REQUIREMENTS" ||
    fail "could not install the packages of $REQUIREMENTS (above): is there a network?"
  rm -f .venv/bin/vlscope # the build installs it again, for this folder and these packages
}

# Leaves `import vlscope` and `vlscope` working in .venv, on the files of this folder.
install_package() {
  quietly uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable . ||
    fail "could not install vlscope into .venv (above)"
}

# What .venv depends on, in one line.
setup_fingerprint() {
  { pwd; readlink -f .venv/bin/python; cat "$REQUIREMENTS"; } | cksum
}

set_up() {
  command -v dpkg-query >/dev/null || fail "this needs the packages of Debian 12 (Bazel, fmt, spdlog, GoogleTest), and there is no dpkg here"
  install_debian_packages "${DEBIAN_PACKAGES[@]}"
  is_suitable_python .venv/bin/python || create_venv
  [[ -e $SETUP_DONE && $(setup_fingerprint) == "$(<"$SETUP_DONE")" ]] && return
  install_python_packages
  setup_fingerprint >"$SETUP_DONE"
}
