#!/usr/bin/env bash
# Draw all figures: run script/visualization/one_click_visualize.sh. Older documents use this path.
set -euo pipefail
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/visualization/one_click_visualize.sh" "$@"
