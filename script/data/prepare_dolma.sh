#!/usr/bin/env bash
# Tokenize Dolma to dataset/dolma_processed/dolma_processed_text_document.bin, .idx and .json.
#
#   bash script/data/prepare_dolma.sh                       # downloads v1_6-sample (16 GB compressed)
#   bash script/data/prepare_dolma.sh --hub-part v1_7 --limit-files 8
#   bash script/data/prepare_dolma.sh --input DIR           # your own folder; no network is needed
#
# DIR holds .json.gz files (or .jsonl.zst, .jsonl, Parquet) with one document per line and its text
# in `text`, in folders of any depth. After an interruption, the same command resumes both the
# download and the tokenization.
#
#   --input PATH...         files and folders, instead of a download
#   --output-prefix PREFIX  write PREFIX_text_document.* instead of the above files
#   --tokenizer-model PATH  Hugging Face folder, SentencePiece .model or .tiktoken file
#                           (model/llama3.2-1b)
#   --tokenizer-type TYPE   HuggingFaceTokenizer, SentencePieceTokenizer, TikTokenizer (guessed)
#   --hub-dataset NAME      another data set on the hub with lists in urls/ (allenai/dolma)
#   --hub-part NAME         another version: v1_7 has 4.5 TB (v1_6-sample)
#   --limit-files N         download the first N files only
#   --download-dir DIR      folder for the downloaded files (dataset/downloads/dolma)
#   --workers N             processes (one per core)
#   --strict                stop at the first line that is not a document
#   --overwrite             replace existing files
#   --dry-run               print the command and run nothing (DRY_RUN=1 does the same)
#   -h, --help              print this
#
# Exit status: 0 the files are complete; 1 an error; 2 a wrong option; 130 interrupted.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../driver.sh"

case " $* " in *' -h '* | *' --help '*) usage "${BASH_SOURCE[0]}"; exit ;; esac

prepare dolma "$@"
