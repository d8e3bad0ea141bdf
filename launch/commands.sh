# Functions for errors, quoting, commands and options, sourced by the launch scripts. The scripts set `dry_run` to `true`
# or `false`.

# refuse MESSAGE…: prints an error and exits with 2, the code for bad input. No launcher restarts after it.
refuse() {
  echo "error: $*" >&2
  exit 2
}

# quoted WORD…: prints the words of a command quoted for a shell.
quoted() {
  local word line=
  for word in "$@"; do
    case "$word" in
      '' | *[!A-Za-z0-9_./:=,@%+-]*)
        # printf %q writes $'…', which a POSIX sh on the remote machine does not support.
        word="'${word//\'/\'\\\'\'}'"
        ;;
    esac
    line="${line:+$line }$word"
  done
  echo "$line"
}

# run COMMAND…: runs a command. With --dry-run it only prints the command.
run() {
  if [ "${dry_run:-false}" = true ]; then
    echo "would run: $(quoted "$@")"
  else
    "$@"
  fi
}

# split_equals "$@": copies the arguments into the array $words. Splits each --option=value before -- into two words,
# except --config.section.key=value.
split_equals() {
  words=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case "$1" in
      --config.*) words+=("$1") ;;
      --*=*) words+=("${1%%=*}" "${1#*=}") ;;
      *) words+=("$1") ;;
    esac
    shift
  done
  words+=("$@")
}

# need_value OPTION "$@": refuses an option without a value.
need_value() {
  [ $# -ge 3 ] || refuse "$1 requires a value"
}

# need_number OPTION VALUE: refuses a value that is not a whole number.
need_number() {
  case "$2" in
    '' | *[!0-9]*) refuse "$1=$2: give a whole number" ;;
    # Bash would read 010 as an octal number.
    0?*) refuse "$1=$2: remove the leading zeros" ;;
  esac
}

# find_option NAME ARGUMENT…: prints the value of an option of maxlm train, or nothing if the option is missing.
find_option() {
  local name="$1"
  shift
  while [ $# -gt 0 ]; do
    case "$1" in
      "$name="*)
        echo "${1#"$name="}"
        return
        ;;
      "$name")
        echo "${2:-}"
        return
        ;;
    esac
    shift
  done
}

find_workdir() {
  find_option --workdir "$@"
}

# check_inputs ROOT ARGUMENT…: checks the config and the data of `maxlm train ARGUMENT…` in the repository ROOT, before
# machines cost money. Exits with the code of the check if it fails.
check_inputs() {
  cd "$1" || exit 1
  shift
  if [ "${dry_run:-false}" != true ] && ! "${PYTHON:-python}" -c 'import maxlm' 2>/dev/null; then
    echo "warning: config and data are not checked, because ${PYTHON:-python} cannot import maxlm; set PYTHON" >&2
  else
    run "${PYTHON:-python}" -m maxlm.train --dry-run=elsewhere "$@" || exit "$?"
  fi
  cd - >/dev/null || exit 1
}
