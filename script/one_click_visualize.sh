#!/usr/bin/env bash
# Draw everything: runs script/visualization/one_click_visualize.sh; older documents use this path.
set -euo pipefail
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/visualization/one_click_visualize.sh" "$@"
