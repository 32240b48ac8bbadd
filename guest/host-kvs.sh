# shellcheck shell=dash
# OctoKV's Host KVS and OctoKV from this guest, one run after the other, against one node: the hash engine here on files
# of ext4 on the kernel's disk; the engine there behind Key Value commands.
# In:  OCTOKV_FILES, the namespace of the file system; OCTOKV_DB_FILES, how many files Host KVS has; OCTOKV_RUNS, a run
#      each, "NAME:SYSTEM:NAMESPACE:PORT:THREADS:KEYS:KIB,": SYSTEM is h for Host KVS, k for keys and b for the engine
#      here on blocks, in a fresh namespace of the node at PORT.
# Out: per run "result: NAME begin", what the program printed, "result: NAME end STATUS".
. /lib.sh

# bench OPTIONS...: every key is stored once, then as many are read.
bench() {
    octokv bench --workload fillseq,readrandom --key-size 4 --value-size $((kib * 1024)) --threads "$threads" --depth 1 \
        --num "$keys" --json - "$@"
}

# host_kvs: on a new file system, which does nothing of its own meanwhile (it would zero its inode tables).
host_kvs() {
    mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=1,lazy_journal_init=1 "$disk" || return 1
    mount -t ext4 -o noinit_itable "$disk" /mnt || return 1
    outcome=0
    bench --system host-kvs --host-kvs-dir /mnt --host-kvs-files "$OCTOKV_DB_FILES" || outcome=$?
    umount /mnt && return $outcome
}

step "connect"
run try_connect
await disk_of "$OCTOKV_FILES" || fail "no disk of namespace $OCTOKV_FILES appeared"
for words in $(echo "$OCTOKV_RUNS" | tr , ' '); do
    IFS=: read -r run system namespace port threads keys kib <<END
$words
END
    url="nvme+tcp://$host_address:$port/$OCTOKV_NQN?nsid=$namespace"
    case $system in
        h) result "$run" host_kvs ;;
        b) result "$run" bench --system remote-engine --url "$url" ;;
        *) result "$run" bench --url "$url" ;;
    esac
done
