#!/usr/bin/env bash
# Prepares a data set on many nodes of a Slurm cluster. Submits one job for each stage of maxlm prepare. Each job starts
# when the one before it has succeeded. The stages scan and shards are arrays of N tasks.
#
#   launch/slurm/prepare.sh --tasks=N [SBATCH OPTION…] -- --input … --output …
#   launch/slurm/prepare.sh --dry-run --tasks=N … -- …          prints the commands only
#
# The nodes need a common directory or bucket for --output, and must all reach the inputs. To continue after a failure,
# run the same command again.
set -euo pipefail
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$folder/../commands.sh"

dry_run=false
tasks=
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case "$1" in
    --dry-run) dry_run=true ;;
    --tasks=*) tasks="${1#--tasks=}" ;;
    --array* | -a* | --dependency* | -d*) refuse "$1: this script sets it; use --tasks=N" ;;
    *) options+=("$1") ;;
  esac
  shift
done
[ $# -gt 1 ] || refuse 'the options of maxlm prepare are missing; add them after --'
shift
[ -n "$tasks" ] || refuse '--tasks is missing: the number of tasks of each array, for example --tasks=32'
need_number --tasks "$tasks"
[ "$tasks" -gt 0 ] || refuse "--tasks=$tasks: must be at least 1"
for word in "$@"; do
  case "$word" in
    --stage | --stage=* | --task | --task=*) refuse "$word: this script sets it; remove it" ;;
  esac
done
[ -n "$(find_option --output "$@")" ] || refuse '--output is missing: a directory or bucket that all nodes can reach'

job=
for stage in scan plan shards merge; do
  words=(sbatch --parsable "--job-name=maxlm-prepare-$stage")
  case "$stage" in
    scan | shards) words+=("--array=0-$((tasks - 1))") ;;
  esac
  [ -z "$job" ] || words+=("--dependency=afterok:$job" --kill-on-invalid-dep=yes)
  words+=(${options[@]+"${options[@]}"} "$folder/prepare.sbatch" "$stage" "$tasks" "$@")
  if $dry_run; then
    run "${words[@]}"
    job="JOB_OF_$stage"
  else
    job="$("${words[@]}")"
    # The name of the cluster follows if there are several.
    job="${job%%;*}"
    echo "submitted stage $stage: job $job"
  fi
done
echo "Next: squeue --me   (the data set is complete when job $job ends)"
