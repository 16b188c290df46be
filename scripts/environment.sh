# Sourced by the scripts beside it: makes .venv once, and names what the distribution lacks. Not a command of its own.
#
#   make_environment [EXTRAS]  .venv with this package, its dependencies and extras (`test,check`), pinned by constraints.txt
#   need COMMAND PACKAGE       a program of the distribution; installed only under CI=true or --install
#
# A second run finds its stamp and does nothing.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
may_install=${CI:-false}

say() { printf '%s\n' "$*" >&2; }

need() {
    local command=$1 package=$2
    command -v "$command" >/dev/null && return
    install_package "$package" "$command"
}

install_package() {
    local package=$1 what=$2 sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    if [ "$may_install" != true ]; then
        say "$what is missing. Install it with"
        say "    $sudo apt-get install -y --no-install-recommends $package"
        say "or run this script again with --install."
        return 1
    fi
    say "installing $package"
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "$package" >/dev/null
}

# A Python of 3.11 or newer that can make environments.
find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        command -v "$candidate" >/dev/null || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
        printf '%s\n' "$candidate"
        return
    done
    say "Python 3.11 or newer is needed; python3 here is $(python3 --version 2>&1 || echo absent)."
    return 1
}

# Whether .venv holds these extras, made since the last change of what is to be in it.
environment_is_made() {
    local stamp
    for stamp in "$root/.venv/.made-$1" "$root/.venv/.made-test,check"; do
        [ "$stamp" -nt "$root/pyproject.toml" ] && [ "$stamp" -nt "$root/constraints.txt" ] && return
    done
    return 1
}

make_environment() {
    local extras=${1:-} base constraints site_packages=()
    environment_is_made "$extras" && return
    base=$(find_python)
    "$base" -c 'import ensurepip' 2>/dev/null || install_package python3-venv "Python's venv module"

    constraints=$(mktemp)
    cp "$root/constraints.txt" "$constraints"
    if "$base" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9))' 2>/dev/null; then
        say "keeping the torch that is on this machine"
        site_packages=(--system-site-packages)
        sed -i '/^torch==/d; /^triton==/d' "$constraints"
    fi
    say "making .venv (once; a few minutes, most of it torch)"
    [ -x "$python" ] || "$base" -m venv "${site_packages[@]}" "$root/.venv"
    "$python" -m pip install -q --disable-pip-version-check -c "$constraints" -e "$root${extras:+[$extras]}"
    case ",$extras," in
        # The reference beside which the model is tested; its own pins (an older torch) do not matter to its models.
        *,test,*) "$python" -m pip install -q --disable-pip-version-check --no-deps -c "$constraints" moshi ;;
    esac
    rm -f "$constraints"
    touch "$root/.venv/.made-$extras"
}
