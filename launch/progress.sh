# What tells a run that goes on from one that fails over and over: its newest checkpoint. Sourced, after commands.sh.

# The newest complete step of a workdir; -1 where there is none, or where that cannot be found out.
newest_step() {
  local workdir="$1" newest=-1 name listed
  [ -n "$workdir" ] || {
    echo -1
    return
  }
  case "$workdir" in
    gs://*)
      # In a bucket a step appears under its number at once; the file that says that it is complete comes last. Buckets
      # with real directories have no such file there: their steps are renamed when they are complete.
      listed="$(gcloud storage ls "$workdir/checkpoints/*/commit_success.txt" 2>/dev/null)" ||
        listed="$(gcloud storage ls "$workdir/checkpoints/" 2>/dev/null)" || listed=
      listed="$(printf '%s\n' "$listed" | sed -n 's|.*/checkpoints/\([0-9][0-9]*\)/.*|\1|p')"
      ;;
    *)
      # A step that is being written has a longer name until it is complete.
      listed="$(ls "$workdir/checkpoints" 2>/dev/null)" || listed=
      ;;
  esac
  for name in $listed; do
    case "$name" in
      *[!0-9]*) ;;
      *) [ "$name" -le "$newest" ] || newest="$name" ;;
    esac
  done
  echo "$newest"
}
