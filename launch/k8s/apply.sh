#!/usr/bin/env bash
# Fills in a manifest of this directory and applies it with kubectl.
#
#   launch/k8s/apply.sh gpu --name N --image I --nodes N [OPTION…] -- ARGUMENTS OF maxlm train
#   launch/k8s/apply.sh tpu --name N --image I --accelerator A --topology T [OPTION…] -- ARGUMENTS OF maxlm train
#
#   --accelerator A          tpu-v4-podslice, tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice or tpu7x
#   --topology T             topology of the slice, such as 4x4 or 2x2x4
#   --nodes N                number of nodes with 8 GPUs; for TPUs, machines per slice (default: four chips each)
#   --slices N               number of TPU slices that train together (multislice), each of several machines
#   --spot                   spot machines of GKE
#   --queue NAME             local queue of Kueue, which starts the job when the machines are free
#   --namespace NS           namespace (default: kubectl's)
#   --claim CLAIM:/MOUNT     PersistentVolumeClaim that all pods share, and its mount path
#   --secret NAME            Secret whose entries become environment variables of the process
#   --service-account NAME   service account of the pods, for bucket access by workload identity
#   --render                 print the manifest without sending it
#   --dry-run                print the manifest and the kubectl command
#
# The image must contain this repository, installed, and have its root as the working directory, as those of Dockerfile.
set -euo pipefail
folder="$(cd "$(dirname "$0")" && pwd)"
root="$(dirname "$(dirname "$folder")")"
. "$folder/../commands.sh"
# In bash 5.2 and later, & in a replacement would stand for the matched text.
shopt -u patsub_replacement 2>/dev/null || true

kind="${1:-}"
case "$kind" in
  gpu) template="$folder/gpu_job.yaml" ;;
  tpu) template="$folder/tpu_jobset.yaml" ;;
  *) refuse "unknown kind ${kind:-(none)}; gpu or tpu" ;;
esac
shift
name=
image=
nodes=
accelerator=
topology=
slices=1
spot=false
queue=
namespace=
claim=
secret=
service_account=
dry_run=false
render=false
split_equals "$@"
set -- ${words[@]+"${words[@]}"}
while [ $# -gt 0 ]; do
  case "${1//_/-}" in
    --name) need_value "$1" "$@" && name="$2" && shift ;;
    --image) need_value "$1" "$@" && image="$2" && shift ;;
    --nodes) need_value "$1" "$@" && nodes="$2" && shift ;;
    --accelerator) need_value "$1" "$@" && accelerator="$2" && shift ;;
    --topology) need_value "$1" "$@" && topology="$2" && shift ;;
    --slices) need_value "$1" "$@" && slices="$2" && shift ;;
    --spot) spot=true ;;
    --queue) need_value "$1" "$@" && queue="$2" && shift ;;
    --namespace) need_value "$1" "$@" && namespace="$2" && shift ;;
    --claim) need_value "$1" "$@" && claim="$2" && shift ;;
    --secret) need_value "$1" "$@" && secret="$2" && shift ;;
    --service-account) need_value "$1" "$@" && service_account="$2" && shift ;;
    --render) render=true ;;
    --dry-run) dry_run=true ;;
    --) shift && break ;;
    *) refuse "unknown option $1; arguments of maxlm train come after --" ;;
  esac
  shift
done

# need_name OPTION VALUE: refuses invalid names of Kubernetes objects. The limit is 52 characters, because Kubernetes
# appends an index and five letters for each pod.
need_name() {
  [[ "$2" =~ ^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$ ]] ||
    refuse "$1=$2: give up to 52 small letters, digits and -, beginning with a letter"
}
[ -n "$name" ] || refuse '--name is missing: a name for the job'
need_name --name "$name"
[ -n "$image" ] || refuse '--image is missing: a container image with this repository'
[[ "$image" =~ ^[A-Za-z0-9][A-Za-z0-9._/:@-]*$ ]] || refuse "--image=$image: not the name of an image"
[ -z "$namespace" ] || need_name --namespace "$namespace"
[ -z "$queue" ] || need_name --queue "$queue"
[ -z "$secret" ] || need_name --secret "$secret"
[ -z "$service_account" ] || need_name --service-account "$service_account"
workdir="$(find_workdir "$@")"
[ -n "$workdir" ] || refuse '--workdir is missing; arguments of maxlm train come after --'
if [ -n "$claim" ]; then
  [[ "$claim" =~ ^[a-z][-a-z0-9]*:/[A-Za-z0-9._/-]+$ ]] || refuse "--claim=$claim: give CLAIM:/MOUNT"
fi
case "$workdir" in
  *://*) ;;
  *)
    [ -n "$claim" ] ||
      refuse "--workdir=$workdir would go with its pod; give a bucket, or --claim CLAIM:/MOUNT and a directory in it"
    ;;
esac

chips=
need_number --slices "$slices"
[ "$slices" -ge 1 ] || refuse "--slices=$slices: give 1 or more"
if [ "$kind" = tpu ]; then
  case "$accelerator" in
    tpu-v4-podslice | tpu-v5-lite-podslice | tpu-v5p-slice | tpu-v6e-slice | tpu7x) ;;
    *)
      refuse "--accelerator=$accelerator: give tpu-v4-podslice, tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice or" \
        tpu7x
      ;;
  esac
  [[ "$topology" =~ ^[1-9][0-9]*x[1-9][0-9]*(x[1-9][0-9]*)?$ ]] ||
    refuse "--topology=$topology: give one such as 4x4 or 2x2x4"
  all_chips=$((${topology//x/*}))
  [ -n "$nodes" ] || nodes=$((all_chips <= 4 ? 1 : all_chips / 4))
elif [ -n "$accelerator$topology" ] || [ "$slices" -gt 1 ]; then
  refuse '--accelerator, --topology and --slices are for tpu'
fi
[ -n "$nodes" ] || refuse '--nodes is missing: how many nodes of 8 GPUs'
need_number --nodes "$nodes"
[ "$nodes" -ge 1 ] || refuse "--nodes=$nodes: give 1 or more"
if [ "$kind" = tpu ]; then
  chips=$((all_chips / nodes))
  case "$((chips * nodes == all_chips)):$chips" in
    1:1 | 1:4 | 1:8) ;;
    *) refuse "--nodes=$nodes: $topology are $all_chips chips, and machines have 1, 4 or 8 of them" ;;
  esac
  # GKE connects only slices of several machines.
  [ "$slices" -eq 1 ] || [ "$nodes" -gt 1 ] || refuse "--slices=$slices: the slice $topology is one machine; give a larger one"
fi

# string TEXT: prints a YAML string in double quotes. It escapes $(…), which Kubernetes would expand.
string() {
  local text="${1//\\/\\\\}"
  text="${text//\"/\\\"}"
  text="${text//$'\n'/\\n}"
  printf '"%s"' "${text//\$(/\$\$(}"
}

# fill NAME VALUE: replaces {{NAME}} in $manifest.
fill() {
  manifest="${manifest//\{\{$1\}\}/$2}"
}

# fill_lines NAME LINE…: replaces the line {{NAME}} in $manifest with the given lines. Without lines it is deleted.
fill_lines() {
  local lines='' line key="$1"
  shift
  for line in ${@+"$@"}; do
    lines="$lines$line"$'\n'
  done
  manifest="${manifest/\{\{$key\}\}$'\n'/$lines}"
}

manifest="$(cat "$template")"$'\n'
case "$kind" in
  gpu) indent='      ' ;;
  tpu) indent='              ' ;;
esac
arguments=()
for argument in "$@"; do
  arguments+=("$indent      - $(string "$argument")")
done
fill name "$name"
fill image "$(string "$image")"
fill nodes "$nodes"
fill accelerator "$accelerator"
fill topology "$(string "$topology")"
fill chips "$chips"
fill slices "$slices"
fill queue "${queue:+, kueue.x-k8s.io/queue-name: $queue}"
if $spot; then
  [ "$kind" = tpu ] || fill_lines selector "${indent}nodeSelector:" "{{selector}}"
  fill_lines selector "$indent  cloud.google.com/gke-spot: 'true'"
  fill_lines toleration "$indent  - {key: cloud.google.com/gke-spot, operator: Exists, effect: NoSchedule}"
else
  fill_lines selector
  fill_lines toleration
fi
if [ -n "$service_account" ]; then
  fill_lines service_account "${indent}serviceAccountName: $service_account"
else
  fill_lines service_account
fi
if [ -n "$secret" ]; then
  fill_lines secret "$indent    envFrom: [{secretRef: {name: $secret}}]"
else
  fill_lines secret
fi
if [ -n "$claim" ]; then
  fill_lines mount "$indent      - {name: runs, mountPath: ${claim#*:}}"
  fill_lines volume "$indent  - name: runs" "$indent    persistentVolumeClaim: {claimName: ${claim%%:*}}"
else
  fill_lines mount
  fill_lines volume
fi
# Arguments are filled in last, so that braces in them are not replaced.
fill_lines arguments "${arguments[@]}"

send=(kubectl apply)
[ -z "$namespace" ] || send+=("--namespace=$namespace")
send+=(-f -)
if $render || $dry_run; then
  printf '%s' "$manifest"
  if ! $render; then
    check_inputs "$root" "$@"
    run "${send[@]}"
  fi
  exit 0
fi
check_inputs "$root" "$@"
code=0
answer="$(printf '%s' "$manifest" | "${send[@]}" 2>&1)" || code=$?
if [ "$code" -eq 0 ]; then
  echo "$answer"
  exit 0
fi
case "$answer" in
  *immutable*)
    [ "$kind" = gpu ] && object=job || object=jobset
    refuse "a $object $name with other settings already exists; run kubectl delete $object $name, or choose another --name"
    ;;
  *'exceeded quota'*) refuse "no quota in the namespace: $(echo "$answer" | grep -i 'exceeded quota' | tail -n 1)" ;;
  *'no matches for kind "JobSet"'*) refuse 'the cluster does not know JobSet; install it: https://jobset.sigs.k8s.io' ;;
esac
echo "error: kubectl: $(echo "$answer" | tail -n 1)" >&2
exit 1
