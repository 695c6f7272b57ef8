#!/usr/bin/env bash
# Trains and verifies the demo in demo-output: scripts/demo.sh OPTIONS..., which are those of gemini train.
# A run that was stopped (Ctrl-C saves it) is continued if the options are the same; a finished one starts over.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly OUTPUT=demo-output
readonly STARTED=$OUTPUT/started  # the options of a run that has not been verified yet
mkdir -p "$OUTPUT/disk"

is_saved() { compgen -G "$OUTPUT/run/checkpoint/step-*[0-9]/seal.json" > /dev/null; }

how=--overwrite
if is_saved && [ "$(cat "$STARTED" 2> /dev/null)" = "$*" ]; then how=--resume; fi
printf '%s\n' "$*" > "$STARTED"

if [ $how = --resume ]; then
  echo "Going on with the run in $OUTPUT/run; 'rm -r $OUTPUT' starts over."
else
  echo "Training under a budget, then once more without one to compare: 1 to 3 minutes on two cores."
  echo "Ctrl-C saves the run, and 'make demo' goes on from there."
fi
code=0
.venv/bin/gemini train "$@" --disk-dir "$OUTPUT/disk" --checkpoint "$OUTPUT/run" --verify $how || code=$?
if [ $code -le 1 ]; then rm -f "$STARTED"; fi  # 1 is a verdict, too: the runs differ
exit $code
