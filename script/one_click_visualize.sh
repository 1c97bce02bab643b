#!/usr/bin/env bash
# Draw everything: script/visualization/one_click_visualize.sh, under the path of older documents.
set -euo pipefail
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/visualization/one_click_visualize.sh" "$@"
