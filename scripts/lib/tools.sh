# Sourced by the other scripts: finds the tools a task needs, installs what is missing where that is possible.
# shellcheck shell=bash

tools_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# The Rust version the workspace asks for.
rust_version() { sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$tools_root/Cargo.toml" | head -n 1; }

# Whether cargo runs and is new enough.
cargo_is_usable() {
    local have
    have="$(cargo --version 2>/dev/null | cut -d ' ' -f 2)" || return 1
    [ -n "$have" ] && [ "$(printf '%s\n%s\n' "$(rust_version)" "$have" | sort -V | head -n 1)" = "$(rust_version)" ]
}

# The Debian package that brings a tool.
package_of() {
    case "$1" in
        pip) echo python3-pip ;;
        venv) echo python3-venv ;;
        cc) echo "gcc libc6-dev" ;;
        aarch64-linux-gnu-gcc) echo "gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;;
        qemu-aarch64) echo qemu-user ;;
        node) echo nodejs ;;
        *) echo "$1" ;;
    esac
}

# Whether a tool is there.
has_tool() {
    case "$1" in
        cargo) cargo_is_usable ;;
        pip) python3 -m pip --version >/dev/null 2>&1 ;;
        venv) python3 -c 'import venv, ensurepip' >/dev/null 2>&1 ;;
        *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}

# rustup is the one way to a compiler as new as ours; distributions lag behind.
install_cargo() {
    local version
    version="$(rust_version)"
    if ! command -v rustup >/dev/null 2>&1; then
        echo "Rust $version or newer is missing. Install it with rustup, then run this again:" >&2
        echo "  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --default-toolchain $version" >&2
        return 1
    fi
    echo "installing Rust $version with rustup"
    rustup toolchain install "$version" --profile minimal --component rustfmt --component clippy || return 1
    export RUSTUP_TOOLCHAIN="$version"
    cargo_is_usable
}

# need_tools TOOL...: returns when all are there; otherwise installs them or says exactly what to install, and fails.
need_tools() {
    local tool missing=() packages=()
    # rustup puts cargo here, and a shell that was open before does not know.
    if ! command -v cargo >/dev/null 2>&1 && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
        PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    fi
    for tool in "$@"; do
        if [ "$tool" = cargo ]; then
            has_tool cargo || install_cargo || return 1
        elif ! has_tool "$tool"; then
            missing+=("$tool")
            read -ra names <<<"$(package_of "$tool")"
            packages+=("${names[@]}")
        fi
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    if [ "$(id -u)" -eq 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing ${packages[*]} (needed: ${missing[*]})"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}" >/dev/null || {
            echo "apt-get could not install ${packages[*]}; install them and run this again" >&2
            return 1
        }
    else
        echo "missing: ${missing[*]}. On Debian or Ubuntu: sudo apt-get install ${packages[*]}" >&2
        return 1
    fi
    for tool in "${missing[@]}"; do
        has_tool "$tool" || { echo "$tool is still missing after installing ${packages[*]}" >&2; return 1; }
    done
}

# find_prometheus: exports BATON_TEST_PROMETHEUS, a folder with prometheus and promtool for the tests: of those on the PATH, or of
# Debian's package, unpacked below .baton (installed, it would be started as a service). Without them the tests that need them are
# skipped, and say so.
find_prometheus() {
    local folder="$tools_root/.baton/prometheus" found="${BATON_TEST_PROMETHEUS:-}"
    [ -n "$found" ] || found="$(dirname "$(command -v prometheus || echo "$folder/usr/bin/prometheus")")"
    if [ ! -x "$found/promtool" ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null 2>&1; then
        echo "unpacking prometheus below .baton"
        mkdir -p "$folder"
        if [ "$(id -u)" -eq 0 ]; then apt-get update -qq || true; fi
        (cd "$folder" && rm -f ./*.deb && apt-get download -qq prometheus >/dev/null && dpkg-deb -x ./*.deb .) || true
        found="$folder/usr/bin"
    fi
    if [ -x "$found/prometheus" ] && [ -x "$found/promtool" ]; then
        export BATON_TEST_PROMETHEUS="$found"
    else
        echo "NO PROMETHEUS: the tests with a real one are skipped. On Debian or Ubuntu: sudo apt-get install prometheus" >&2
    fi
}

# find_etcd: exports BATON_TEST_ETCD, a real etcd server for the tests: the one on the PATH, or Debian's, unpacked below
# .baton (installed, it would be started as a service). Without either the tests that need it are skipped, and say so.
find_etcd() {
    local folder="$tools_root/.baton/etcd" found
    found="${BATON_TEST_ETCD:-$(command -v etcd || true)}"
    [ -n "$found" ] || found="$folder/usr/bin/etcd"
    if [ ! -x "$found" ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null 2>&1; then
        echo "unpacking etcd-server below .baton"
        mkdir -p "$folder"
        if [ "$(id -u)" -eq 0 ]; then apt-get update -qq || true; fi
        (cd "$folder" && rm -f ./*.deb && apt-get download -qq etcd-server >/dev/null && dpkg-deb -x ./*.deb .) || true
    fi
    if [ -x "$found" ]; then
        export BATON_TEST_ETCD="$found"
    else
        echo "NO ETCD: the tests with a real etcd are skipped. On Debian or Ubuntu: sudo apt-get install etcd-server" >&2
    fi
}
