# Sourced by every entry point in scripts/: finds Python, makes or updates a virtual environment under the
# repository and installs the package into it. Progress goes to stderr, so a script's stdout stays its answer.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/pins.env
source "$ROOT/scripts/pins.env"

# Those of the script that sources this.
SCRIPT_ARGUMENTS=("$@")

say() { printf '==> %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints a Python >= 3.11; $PYTHON wins when it is set.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "No Python 3.11 or newer was found. Install one, or name it: PYTHON=/path/to/python3 $0"
}

# Copies what goes into the wheel to $1. Building in the tree would leave build/lib behind, whose files outlive
# their deletion from the sources and end up in the next wheel.
copy_sources() {
    tar -C "$ROOT" --exclude='__pycache__' --exclude='*.egg-info' -cf - \
        pyproject.toml README.md LICENSE hf_kvpolicy eval configs model_patches | tar -C "$1" -xf -
}

# What the installed dependencies depend on; a change of any of it installs them again.
dependency_stamp() {
    printf '%s\n' "$@"
    "$VENV/bin/python" - "$ROOT/pyproject.toml" <<'PY'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(sys.version, project["dependencies"], project["optional-dependencies"], sep="\n")
PY
}

# Prints what a script says of itself and ends it where help is asked for: no environment is made for that.
help_without_venv() {
    local argument
    for argument in ${SCRIPT_ARGUMENTS[@]+"${SCRIPT_ARGUMENTS[@]}"}; do
        case "$argument" in
            -h | --help)
                sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
                say "its options are listed once $1 exists, which a first run makes"
                exit 0
                ;;
        esac
    done
}

# make_venv DIR TRANSFORMERS_VERSION EXTRAS: afterwards $VENV is ready and holds a fresh build of the package.
make_venv() {
    VENV="$ROOT/$1"
    local transformers="transformers==$2" extras="$3" copy stamp
    if ! "$VENV/bin/python" -c '' 2>/dev/null; then
        help_without_venv "$1"
        say "creating $1"
        rm -rf "$VENV"
        "$(find_python)" -m venv "$VENV"
    fi
    copy=$(mktemp -d)
    # shellcheck disable=SC2064  # expand now: the name is local
    trap "rm -rf '$copy'" EXIT
    copy_sources "$copy"
    stamp=$(dependency_stamp "$TORCH_PIN" "$transformers" "$extras")
    if [ "$stamp" != "$(cat "$VENV/.pins" 2>/dev/null)" ]; then
        say "installing $TORCH_PIN, $transformers and the extras [$extras] into $1 (minutes the first time)"
        rm -f "$VENV/.pins"
        "$VENV/bin/python" -m pip install --upgrade "setuptools>=77" wheel |
            sed -u '/^Requirement already satisfied/d' >&2
        "$VENV/bin/python" -m pip install "$TORCH_PIN" "$transformers" "${copy}[$extras]" |
            sed -u '/^Requirement already satisfied/d' >&2
        printf '%s\n' "$stamp" >"$VENV/.pins"
    fi
    say "installing hf_kvpolicy into $1"
    "$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall "$copy" >&2
    rm -rf "$copy"
    trap - EXIT
}
