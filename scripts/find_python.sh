#!/bin/sh
# Print a Python >= 3.12 that really runs, or one sentence on stderr.
# A version manager's shim can be on the PATH and fail, so each is tried.

runs() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' \
        >/dev/null 2>&1
}

for name in python3.14 python3.13 python3.12 python3; do
    if runs "$name"; then
        command -v "$name"
        exit 0
    fi
done

if command -v pyenv >/dev/null 2>&1; then
    versions="$(pyenv root 2>/dev/null)/versions"
    for folder in "$versions"/3.14* "$versions"/3.13* "$versions"/3.12*; do
        if runs "$folder/bin/python"; then
            echo "$folder/bin/python"
            exit 0
        fi
    done
fi

if command -v uv >/dev/null 2>&1; then
    found="$(uv python find '>=3.12' 2>/dev/null)"
    if [ -n "$found" ] && runs "$found"; then
        echo "$found"
        exit 0
    fi
fi

echo "jaxkv needs Python 3.12 or newer and found none that runs; install one" \
    "(for example with 'uv python install 3.13') and try again." >&2
exit 1
