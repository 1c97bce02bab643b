#!/usr/bin/env bash
# Tokenize Wikipedia to dataset/wikipedia_processed/wikipedia_processed_text_document.bin, .idx and
# .json.
#
#   bash script/data/prepare_wikipedia.sh                  # downloads English Wikipedia (20231101.en)
#   bash script/data/prepare_wikipedia.sh --limit-files 1  # only its first file
#   bash script/data/prepare_wikipedia.sh --input DIR      # your own folder; no network is needed
#   bash script/data/prepare_wikipedia.sh --input wikitext-2/ --tokenizer-model tokenizer.model \
#       --output-prefix dataset/wikitext/wikitext
#
# DIR holds Parquet or JSONL with the text of an article in `text` (as on the Hugging Face hub), the
# output of `wikiextractor --json` for an XML dump, or plain text whose articles begin with
# ` = Title = ` (wikitext). JSONL and text may be compressed. After an interruption, the same command
# resumes.
#
#   --input PATH...         files and folders, instead of a download
#   --output-prefix PREFIX  write PREFIX_text_document.* instead of the above files
#   --tokenizer-model PATH  Hugging Face folder, SentencePiece .model or .tiktoken file
#                           (model/llama3.2-1b)
#   --tokenizer-type TYPE   HuggingFaceTokenizer, SentencePieceTokenizer, TikTokenizer (guessed)
#   --hub-dataset NAME      another data set on the hub (wikimedia/wikipedia)
#   --hub-part NAME         another configuration of it, such as 20231101.zh (20231101.en)
#   --limit-files N         download the first N files only
#   --download-dir DIR      folder for files from servers other than the hub (dataset/downloads)
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

prepare wikipedia "$@"
