# Sourced by try.sh, test.sh and .ci/run: `simkit_env EXTRAS` makes or reuses .venv and installs this checkout into it.
#
# A bare Debian refuses a system-wide pip and may lack python3-venv, hence the virtual environment and the ways to get one.
# SIMKIT_VENV names another folder, PYTHON another interpreter.

say() { printf '%s\n' "simkit: $*" >&2; }
die() { say "$*"; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            printf '%s' "$candidate"
            return 0
        fi
    done
    return 1
}

# True where packages may be installed with apt: a root account on a Debian (a container, a CI machine).
may_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" </dev/null >/dev/null 2>&1 && return 0
    apt-get update </dev/null >/dev/null 2>&1
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" </dev/null >/dev/null 2>&1
}

# Each way leaves nothing behind when it fails: `venv` without ensurepip stops half-way.
way_venv() { "$1" -m venv "$2" >/dev/null 2>&1; }
way_borrowed_pip() {
    "$1" -m pip --version >/dev/null 2>&1 && "$1" -m venv --without-pip "$2" >/dev/null 2>&1 &&
        "$1" -m pip --python "$2/bin/python" install --quiet --disable-pip-version-check pip
}
way_virtualenv() { "$1" -m virtualenv --quiet "$2" >/dev/null 2>&1 || virtualenv --quiet --python "$1" "$2" >/dev/null 2>&1; }
way_uv() { uv venv --quiet --seed --python "$1" "$2" >/dev/null 2>&1; }
way_apt() {
    may_apt || return 1
    say "installing python3-venv with apt"
    apt_install python3-venv "$(basename "$(readlink -f "$(command -v "$1")")")-venv" || apt_install python3-venv
    "$1" -m venv "$2" >/dev/null 2>&1
}

make_venv() {
    local python=$1 venv=$2 way
    for way in venv borrowed_pip virtualenv uv apt; do
        rm -rf "$venv"
        if "way_$way" "$python" "$venv" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            return 0
        fi
    done
    rm -rf "$venv"
    die "cannot make a virtual environment: install python3-venv (Debian: sudo apt install python3-venv) and try again"
}

# simkit_env EXTRAS: installs the checkout with these extras ("" for none); a stamp makes the second call take no time.
simkit_env() {
    local extras=$1 python stamp wanted
    VENV=${SIMKIT_VENV:-.venv}
    if ! new_enough "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        if ! python=$(find_python); then
            may_apt && apt_install python3 python3-venv
            python=$(find_python) || die "needs Python 3.11 or newer (Debian 12: sudo apt install python3 python3-venv)"
        fi
        say "making $VENV with $python"
        make_venv "$python" "$VENV"
    fi
    wanted="$extras $PWD $(cksum <pyproject.toml)"
    stamp="$VENV/.simkit-installed"
    if [ ! -f "$stamp" ] || ! grep -qxF "$wanted" "$stamp" || ! "$VENV/bin/python" -c 'import simkit' >/dev/null 2>&1; then
        say "installing simkit${extras:+ with its extras $extras} into $VENV"
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}" ||
            die "the installation failed; see above"
        # What the tests need includes what a first try needs, so that going back and forth reinstalls nothing.
        { printf '%s\n' "$wanted"; [ -z "$extras" ] || printf '%s\n' " $PWD $(cksum <pyproject.toml)"; } >"$stamp"
    fi
}
