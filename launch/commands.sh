# How the launch scripts refuse, show and run; sourced by them. They set `dry_run` to `true` or `false`.

# Ends with one line and the exit code of bad input, after which nothing starts again by itself.
refuse() {
  echo "error: $*" >&2
  exit 2
}

# The words of a command as a shell would read them back.
quoted() {
  local word line=
  for word in "$@"; do
    case "$word" in
      '' | *[!A-Za-z0-9_./:=,@%+-]*)
        # Quoted by hand: printf %q writes $'…', which a plain sh on the other machine does not read.
        word="'${word//\'/\'\\\'\'}'"
        ;;
    esac
    line="${line:+$line }$word"
  done
  echo "$line"
}

# Runs a command, or with --dry-run only prints it.
run() {
  if [ "${dry_run:-false}" = true ]; then
    echo "would run: $(quoted "$@")"
  else
    "$@"
  fi
}

# split_equals "$@": puts the arguments into the array $words, each --option=value before -- as two of them,
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

# need_value OPTION "$@": the option has a value.
need_value() {
  [ $# -ge 3 ] || refuse "$1 needs a value"
}

# need_number OPTION VALUE: the value is a whole number.
need_number() {
  case "$2" in
    '' | *[!0-9]*) refuse "$1=$2: give a whole number" ;;
  esac
}

# find_option NAME ARGUMENT…: the value of an option in the arguments of maxlm.train; nothing if it is not there.
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
