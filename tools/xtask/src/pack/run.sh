#!/usr/bin/env bash
# Runs the contents of a pack made by `cargo xtask pack`, on a machine with a GPU and without cargo.
#
#   run.sh tests            runs every packed test, one at a time; without a GPU they fail
#   run.sh conform          runs every conformance case on the GPU, records its answers and compares
#                           them with those in answers/
#   run.sh edges            asks the GPU's driver in C (conformance-c), records its answers in edges.tsv
#                           and compares them with those in answers/
#   run.sh stand-in         runs the cases through the packed libcuda.so.1, on host memory
#   run.sh replay FOLDER    replays the Azure traces in FOLDER on the GPU
#   run.sh dlpack LIBRARY   exchanges GPU memory with Python's torch or cupy, which is found by
#                           PYTHONPATH; Python itself is $PYTHON or python3
#   run.sh torch            compares PyTorch over cuvmm's heap with PyTorch's own allocators, for 220
#                           seconds at most; needs gcc, and PyTorch in $PYTHON or python3
#   run.sh pools            tries to share memory of cudaMallocAsync, PyTorch's too, with another
#                           process, by libcuda alone; needs PyTorch in $PYTHON or python3
#   run.sh python [NAME...] runs the GPU tests of the Python package with $PYTHON or python3, natively,
#                           under install and in a pool, its examples, and sleep beside
#                           torch_memory_saver, whose wheel or unpacked folder is
#                           $TORCH_MEMORY_SAVER; its own tests too, if $TORCH_MEMORY_SAVER_CLONE is
#                           a clone of it. NAMEs are parts of names of test files; all but these tests
#                           is left out then
#   run.sh info             runs `cuvmm info`
#   run.sh all [FOLDER]     info, tests, stand-in, conform, edges, and replay if FOLDER is given
#
# Results are written to $OUT, or to the folder out beside this script. Exits with 1 if a step
# failed. CUVMM_SKIP_TESTS is a space-separated list of names, or parts of names, of tests to skip.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$here/out}
mkdir -p "$out"
export CUVMM_BIN=$here/bin/cuvmm
export CUVMM_BENCH_BIN=$here/bin/cuvmm-bench
export CUVMM_REQUIRE_GPU=${CUVMM_REQUIRE_GPU:-1}

passed=0
failed=0
skipped=0
wrong=()

# step NAME COMMAND...: runs the command, saves its output and prints the time it took.
step() {
    local name=$1 start=$SECONDS
    shift
    echo "== $name"
    if "$@" 2>&1 | tee "$out/$name.log"; then
        echo "== $name: done in $((SECONDS - start)) s"
    else
        echo "== $name: FAILED after $((SECONDS - start)) s"
        wrong+=("$name")
    fi
}

tests() {
    local test skip
    for test in "$here"/tests/*; do
        [ -x "$test" ] || continue
        local name
        name=$(basename "$test")
        for skip in ${CUVMM_SKIP_TESTS:-}; do
            case $name in *"$skip"*) echo "== $name: skipped"; continue 2 ;; esac
        done
        step "$name" "$test" --test-threads=1
        local line
        if line=$(grep '^test result: ' "$out/$name.log" | tail -n 1) && [ -n "$line" ]; then
            passed=$((passed + $(sed -E 's/.* ([0-9]+) passed.*/\1/' <<<"$line")))
            failed=$((failed + $(sed -E 's/.* ([0-9]+) failed.*/\1/' <<<"$line")))
            skipped=$((skipped + $(sed -E 's/.* ([0-9]+) ignored.*/\1/' <<<"$line")))
        else
            # It ended before it printed its counts.
            failed=$((failed + 1))
        fi
    done
}

conform() {
    local answers=$out/answers.json
    step conform-record "$CUVMM_BENCH_BIN" conform --driver cuda --slow --record "$answers"
    local known
    for known in "$here"/answers/*.json; do
        [ -e "$known" ] || continue
        step "conform-against-$(basename "$known" .json)" \
            "$CUVMM_BENCH_BIN" conform --driver cuda --slow --against "$known"
    done
}

edges() {
    step edges-record "$here/bin/conformance-c" --record "$out/edges.tsv"
    local known
    for known in "$here"/answers/*.tsv; do
        [ -e "$known" ] || continue
        step "edges-against-$(basename "$known" .tsv)" "$here/bin/conformance-c" --against "$known"
    done
}

# The loader finds the packed library instead of the driver.
stand_in() {
    step stand-in env LD_LIBRARY_PATH="$here/lib" "$CUVMM_BENCH_BIN" conform --driver cuda
}

replay() {
    local traces=$1
    step replay "$CUVMM_BIN" replay --memory 8GiB --policy both --driver cuda \
        --model "conv=$traces/azure-conv-first-half.csv" \
        --model "code=$traces/azure-code.csv"
    step replay-json "$CUVMM_BIN" replay --memory 8GiB --policy both --driver cuda --json \
        --model "conv=$traces/azure-conv-first-half.csv" \
        --model "code=$traces/azure-code.csv"
}

dlpack() {
    step "dlpack-$1" "${PYTHON:-python3}" "$here/dlpack.py" --on "$1" \
        --library "$here/lib/libdlpack_python.so"
}

torch() {
    step torch "${PYTHON:-python3}" "$here/bench/compare.py" \
        --library "$here/lib/libcuvmm_torch.so" --json "$out/torch.json"
}

# The package is unpacked beside the wheel, which a machine without a package registry can do.
python() {
    local site=$here/python/site
    rm -rf "$site"
    "${PYTHON:-python3}" -m zipfile -e "$here"/python/cuvmm-*.whl "$site"
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
    step python "${PYTHON:-python3}" "$here/python/tests/gpu.py" --log "$out/python" "$@"
    local line
    if line=$(grep -E '^[0-9]+ passed, ' "$out/python.log" | tail -n 1) && [ -n "$line" ]; then
        passed=$((passed + $(cut -d' ' -f1 <<<"$line")))
        failed=$((failed + $(cut -d' ' -f3 <<<"$line")))
        skipped=$((skipped + $(cut -d' ' -f5 <<<"$line")))
    fi
    [ $# -eq 0 ] || return 0
    local example=$here/python/examples
    step python-train-native "${PYTHON:-python3}" "$example/train.py" --native
    step python-train "${PYTHON:-python3}" "$example/train.py" --limit 8GiB
    step python-sleep "${PYTHON:-python3}" "$example/sleep.py"
    step python-sleep-installed "${PYTHON:-python3}" "$example/sleep.py" --install
    step python-graphs "${PYTHON:-python3}" "$example/graphs.py"
    step python-graphs-installed "${PYTHON:-python3}" "$example/graphs.py" --install
    step python-publish "${PYTHON:-python3}" "$example/publish.py"
    step python-bench-sleep "${PYTHON:-python3}" "$here/python/bench/sleep.py" \
        --json "$out/python-sleep.json" ${TORCH_MEMORY_SAVER:+--tms "$TORCH_MEMORY_SAVER"}
    if [ -n "${TORCH_MEMORY_SAVER_CLONE:-}" ]; then
        local examples=$here/python/tests/tms_examples.py
        step python-tms "${PYTHON:-python3}" "$examples" "$TORCH_MEMORY_SAVER_CLONE" --log "$out/tms"
        step python-tms-installed "${PYTHON:-python3}" "$examples" "$TORCH_MEMORY_SAVER_CLONE" --install \
            --log "$out/tms-installed"
    fi
    step python-two-models "${PYTHON:-python3}" "$example/two_models.py"
}

usage() {
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

case ${1:-} in
tests) tests ;;
conform) conform ;;
edges) edges ;;
stand-in) stand_in ;;
replay) [ $# -eq 2 ] || usage; replay "$2" ;;
dlpack) [ $# -eq 2 ] || usage; dlpack "$2" ;;
torch) torch ;;
pools) step pools "${PYTHON:-python3}" "$here/bench/pools.py" ;;
python) shift; python "$@" ;;
info) step info "$CUVMM_BIN" info ;;
all)
    step info "$CUVMM_BIN" info
    tests
    stand_in
    conform
    edges
    [ $# -lt 2 ] || replay "$2"
    ;;
*) usage ;;
esac

for name in ${wrong[@]+"${wrong[@]}"}; do
    echo "FAILED: $name"
done
# A failed step that is not a test counts as one failed test.
if [ ${#wrong[@]} -gt "$failed" ]; then
    failed=${#wrong[@]}
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
