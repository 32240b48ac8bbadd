# shellcheck shell=dash
# Iterators of the ordered namespace, number 4, through the kernel's passthrough, which returns the completion's first dword alone:
# the end is told in the data. Sourced by guest-keys.sh, connected with a queue for each processor. Leaves nothing behind.

# The character device of namespace 4, in $ordered; the kernel numbers devices as it likes.
ordered_device() {
    for ordered in /dev/ng*n*; do
        nvme get-ns-id "$ordered" 2>/tmp/err | grep -q 'namespace-id:4$' && return 0
    done
    return 1
}

# on_ordered OPCODE OPTIONS...: one command on the ordered namespace; its output in /tmp/out, its messages in /tmp/err.
on_ordered() {
    opcode=$1
    shift
    nvme io-passthru "$ordered" -o "$opcode" -n 4 "$@" >/tmp/out 2>/tmp/err
}

# put_ordered KEY VALUE
put_ordered() {
    printf %s "$2" >/tmp/value
    # shellcheck disable=SC2046 # The fields are words by intention.
    on_ordered 0x01 $(key_fields "$1") --write -l ${#2} -i /tmp/value --cdw10=${#2} --cdw11=${#1} ||
        fail "storing $1 failed"
}

delete_ordered() {
    # shellcheck disable=SC2046 # The fields are words by intention.
    on_ordered 0x10 $(key_fields "$1") --cdw11=${#1} || fail "deleting $1 failed"
}

# create FLAGS LOWER UPPER: an iterator, in $iterator. Each bound has at most 7 bytes; an empty one is open.
create() {
    printf "\\${#2}\\000\\${#3}\\000%s%s" "$2" "$3" >/tmp/bounds
    size=$(stat -c %s /tmp/bounds)
    on_ordered 0xa1 --write -l "$size" -i /tmp/bounds --cdw10="$size" --cdw11="$1" || fail "the create failed"
    iterator=$(sed -n 's/.*result: *//p' /tmp/err)
    [ $((iterator)) -gt 0 ] || fail "the iterator is \"$iterator\""
}

# next_pairs MOST [BUFFER BYTES]
next_pairs() { on_ordered 0xa2 --read -b -l "${2:-4096}" --cdw10="${2:-4096}" --cdw11="$iterator" --cdw12="$1"; }

# pairs_are MOST PAIR...: the next pairs are exactly these, each KEY=VALUE, and behind the last one "end" if they are the last.
pairs_are() {
    next_pairs "$1" || fail "the next failed"
    shift
    od -An -v -tu1 /tmp/out | awk '
        function number(at, bytes,  sum) { while (bytes-- > 0) sum = 256 * sum + byte[at + bytes]; return sum + 0 }
        function text(at, bytes,  all) { while (bytes-- > 0) all = all sprintf("%c", byte[at++] + 0); return all }
        { for (i = 1; i <= NF; i++) byte[n++] = $i }
        END {
            at = 8
            for (pair = number(0, 4); pair > 0; pair--) {
                printf "%s=%s ", text(at + 8, number(at + 4, 2)), text(at + 8 + number(at + 4, 2), number(at, 4))
                at += 8 + number(at + 4, 2) + number(at, 4)
                at += (8 - at % 8) % 8
            }
            if (number(4, 4) % 2) printf "end "
        }' >/tmp/pairs
    wanted="$*${*:+ }"
    [ "$(cat /tmp/pairs; echo .)" = "$wanted." ] || fail "the pairs are \"$(cat /tmp/pairs)\", not \"$wanted\""
    count=0
    for pair in "$@"; do [ "$pair" = end ] || count=$((count + 1)); done
    completion_is $count
}

# seek KEY
seek() {
    printf %s "$1" >/tmp/key
    on_ordered 0xa5 --write -l ${#1} -i /tmp/key --cdw10=${#1} --cdw11="$iterator" || fail "the seek failed"
}

# refused_by_iterators STATUS COMMAND...: it fails with this vendor status (two hexadecimal digits).
refused_by_iterators() {
    wanted=$1
    shift
    "$@" && fail "\"$*\" succeeded; status 7/${wanted}h was due"
    grep -Eq "\(0x[246]?7$wanted\)" /tmp/out /tmp/err || fail "\"$*\" did not answer status 7/${wanted}h"
}

step "iterators: pairs in the order of keys, some at a time, and the end in the data"
await ordered_device || fail "the ordered namespace has no character device"
for key in pear fig cherry apple banana; do put_ordered $key "a-$key"; done
create 0 "" ""
pairs_are 2 apple=a-apple banana=a-banana
pairs_are 100 cherry=a-cherry fig=a-fig pear=a-pear end
pairs_are 1 end

step "iterators: a snapshot, whatever is written meanwhile"
create 0 "" ""
pairs_are 1 apple=a-apple
put_ordered cherry another
put_ordered date new
delete_ordered fig
pairs_are 100 banana=a-banana cherry=a-cherry fig=a-fig pear=a-pear end
create 0 c ""
pairs_are 100 cherry=another date=new pear=a-pear end

step "iterators: bounds, the reverse order, keys alone, a seek"
create 1 banana fig
pairs_are 100 date=new cherry=another banana=a-banana end
seek d
pairs_are 1 cherry=another
create 2 b d
pairs_are 100 banana= cherry= end
create 0 x ""
pairs_are 1 end

step "iterators: a pair longer than the buffer stays"
create 0 pear ""
refused_by_iterators 03 next_pairs 1 16
pairs_are 1 pear=a-pear end

step "iterators: one iterator from the queues of both processors"
create 0 "" ""
for pair in 0:apple=a-apple 1:banana=a-banana 0:cherry=another 1:date=new; do
    taskset -p $((${pair%%:*} + 1)) $$ >/dev/null || fail "this guest has no processor ${pair%%:*}"
    pairs_are 1 "${pair#*:}"
done
taskset -p 3 $$ >/dev/null

step "iterators: destroyed ones, unknown ones, and a namespace that has none"
on_ordered 0xa8 --cdw11="$iterator" || fail "the destroy failed"
refused_by_iterators 01 next_pairs 1
refused_by_iterators 01 on_ordered 0xa8 --cdw11="$iterator"
refused_with 01 passthru 0xa1 "" --write -l 4 -i /tmp/bounds --cdw10=4
refused_with 02 on_ordered 0xa1 --write -l 4 -i /tmp/bounds --cdw10=4 --cdw11=4
for key in pear cherry apple banana date; do delete_ordered $key; done
