# bash completion for skyctl. Written by scripts/generate-completions. Do not edit.

# Values that depend on this machine: skyctl itself answers.
_skyctl_ask() {
    local IFS=$'\n'
    COMPREPLY=($(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \
        _SKYCTL_COMPLETE=complete_bash "${COMP_WORDS[0]}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]] && compopt -o nospace 2>/dev/null
}

_skyctl_words() {
    COMPREPLY=($(compgen -W "$1" -- "${COMP_WORDS[COMP_CWORD]}"))
}

_skyctl_files() {
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
}

_skyctl() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD - 1]}"
    local path="" word index
    for ((index = 1; index < COMP_CWORD; index++)); do
        word="${COMP_WORDS[index]}"
        [[ $word == -* ]] && continue
        if [[ -z $path ]]; then
            path=$word
        elif [[ " rollout canary jobs weights adapters tinker " == *" $path "* ]]; then
            path="$path $word"
            break
        else
            break
        fi
    done
    COMPREPLY=()
    case "$path" in
        "")
            case "$prev" in
                --token-file) true; return ;;
                --ca) true; return ;;
            esac
            _skyctl_words "init validate plan schema up rollout drain down status ls top wait logs events restart recover scale pause resume sleep wake switch sync-weights canary jobs weights adapters tinker generate urls doctor smoke help --version -q --quiet --no-color --debug --token-file --ca -h --help" ;;
        "init")
            case "$prev" in
                --name) true; return ;;
                --model) _skyctl_ask; return ;;
                --replicas) true; return ;;
                --servers) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "--tiny --name --model --replicas --servers --force --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_files
            fi ;;
        "validate")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --offline --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_files
            fi ;;
        "plan")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_files
            fi ;;
        "schema")
            _skyctl_words "--json -h --help -q --quiet --no-color --debug" ;;
        "up")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
                --parallel) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --attach --timeout --no-router --rollback --parallel --no-undo --dry-run --yes -y --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_files
            fi ;;
        "rollout")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "undo -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "rollout undo")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --parallel) true; return ;;
                --timeout) true; return ;;
            esac
            _skyctl_words "-f --file --fleet --parallel --timeout --dry-run --yes -y --json -h --help -q --quiet --no-color --debug" ;;
        "drain")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --off --json -h --help -q --quiet --no-color --debug" ;;
        "down")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --drain-timeout) true; return ;;
            esac
            _skyctl_words "-f --file --fleet --drain-timeout --json -h --help -q --quiet --no-color --debug" ;;
        "status")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --interval) true; return ;;
            esac
            _skyctl_words "-f --file --fleet -w --watch --interval --exit-code --json -h --help -q --quiet --no-color --debug" ;;
        "ls")
            case "$prev" in
                --fleet) true; return ;;
            esac
            _skyctl_words "--fleet --json -h --help -q --quiet --no-color --debug" ;;
        "top")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --interval) true; return ;;
            esac
            _skyctl_words "-f --file --fleet --interval --once --json -h --help -q --quiet --no-color --debug" ;;
        "wait")
            case "$prev" in
                --for) _skyctl_ask; return ;;
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "--for -f --file --fleet --timeout --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "logs")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                -n|--lines) true; return ;;
                --since) true; return ;;
                --until) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet -F --follow -n --lines --since --until --probes --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "events")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --since) true; return ;;
                -n|--lines) true; return ;;
            esac
            _skyctl_words "-f --file --fleet -F --follow --since -n --lines --json -h --help -q --quiet --no-color --debug" ;;
        "restart")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "recover")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            _skyctl_words "-f --file --fleet --dry-run -y --yes --timeout --json -h --help -q --quiet --no-color --debug" ;;
        "scale")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "pause")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --mode) _skyctl_words "abort wait keep"; return ;;
                --timeout) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --mode --clear-cache --keep-cache --keep-partial --timeout --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "resume")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --force --timeout --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "sleep")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --level) true; return ;;
                --timeout) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --level --timeout --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "wake")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --tags) true; return ;;
                --timeout) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --tags --timeout --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "switch")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --timeout --dry-run --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "sync-weights")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
                --weight-version) true; return ;;
                --draft) true; return ;;
                --watch) _skyctl_files; return ;;
                --mode) _skyctl_words "abort wait keep"; return ;;
                --rolling) true; return ;;
                --trial) _skyctl_files; return ;;
                --sleep-after) true; return ;;
                --verify|--no-verify) true; return ;;
                --scan-nan|--no-scan) true; return ;;
                --allow-config) true; return ;;
                --transport) _skyctl_words "auto nccl ipc gloo shm disk"; return ;;
                --stage) _skyctl_words "auto gpu host stream"; return ;;
                --stage-rate) true; return ;;
                --layout) _skyctl_words "auto runtime checkpoint"; return ;;
                --chunk-size) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --dry-run --detach --timeout --json --weight-version --rollback --keep --draft --watch --mode --rolling --trial --colocated --sleep-after --verify --no-verify --scan-nan --no-scan --allow-unproven-reload --allow-config --transport --stage --stage-rate --layout --chunk-size -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "canary")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "start status promote rollback -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "canary start")
            case "$prev" in
                --share) true; return ;;
                --replicas) true; return ;;
                --weight-version) true; return ;;
                --rollback-if) true; return ;;
                --promote-after) true; return ;;
                --timeout) true; return ;;
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "--share --replicas --weight-version --keep --rollback-if --promote-after --timeout -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "canary status")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "canary promote")
            case "$prev" in
                --timeout) true; return ;;
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "--timeout -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "canary rollback")
            case "$prev" in
                --timeout) true; return ;;
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "--timeout -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "jobs")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "show wait cancel -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "jobs show")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --timeline --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "jobs wait")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --timeout --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "jobs cancel")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --timeout --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
        "weights")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "history verify kept save rendezvous forget -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "weights history")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --plot --json -h --help -q --quiet --no-color --debug" ;;
        "weights verify")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "weights kept")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "weights save")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --version) true; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "-f --file --fleet --version --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_files
            fi ;;
        "weights rendezvous")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --master-address) true; return ;;
                --master-port) true; return ;;
            esac
            _skyctl_words "-f --file --fleet --master-address --master-port --json -h --help -q --quiet --no-color --debug" ;;
        "weights forget")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "adapters")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "list load sync unload -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "adapters list")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "adapters load")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            _skyctl_words "--any-base -f --file --fleet --timeout --json -h --help -q --quiet --no-color --debug" ;;
        "adapters sync")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            _skyctl_words "--any-base -f --file --fleet --timeout --json -h --help -q --quiet --no-color --debug" ;;
        "adapters unload")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --timeout) true; return ;;
            esac
            _skyctl_words "-f --file --fleet --timeout --json -h --help -q --quiet --no-color --debug" ;;
        "tinker")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "ls path export rm -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "tinker ls")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "--all -f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "tinker path")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "tinker export")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            if [[ $cur == -* ]]; then _skyctl_words "--merged -f --file --fleet --json -h --help -q --quiet --no-color --debug"; else
                _skyctl_files
            fi ;;
        "tinker rm")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --json -h --help -q --quiet --no-color --debug" ;;
        "generate")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                -i|--input) _skyctl_files; return ;;
                -o|--output) _skyctl_files; return ;;
                --model) true; return ;;
                --max-tokens) true; return ;;
                --temperature) true; return ;;
                --n) true; return ;;
                --session-id) true; return ;;
                --server) _skyctl_ask; return ;;
                --concurrency) true; return ;;
                --retries) true; return ;;
                --timeout) true; return ;;
            esac
            _skyctl_words "-f --file --fleet -i --input -o --output --json --model --chat --max-tokens --temperature --n --ignore-eos --session-id --server --concurrency --retries --timeout -h --help -q --quiet --no-color --debug" ;;
        "urls")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --format) _skyctl_words "skyrl prime-rl openai env tinker trainer"; return ;;
                --prometheus-sd) _skyctl_files; return ;;
            esac
            _skyctl_words "-f --file --fleet --format --export --prometheus-sd --show-key --json -h --help -q --quiet --no-color --debug" ;;
        "doctor")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
            esac
            _skyctl_words "-f --file --fleet --verify --strict --json -h --help -q --quiet --no-color --debug" ;;
        "smoke")
            case "$prev" in
                -f|--file) _skyctl_files; return ;;
                --fleet) _skyctl_ask; return ;;
                --checkpoint) _skyctl_ask; return ;;
                --timeout) true; return ;;
                --junit) _skyctl_files; return ;;
                --summary) _skyctl_files; return ;;
                --keep-logs) _skyctl_files; return ;;
            esac
            _skyctl_words "-f --file --fleet --checkpoint --reuse --timeout --junit --summary --keep-logs --json -h --help -q --quiet --no-color --debug" ;;
        "help")
            if [[ $cur == -* ]]; then _skyctl_words "--json -h --help -q --quiet --no-color --debug"; else
                _skyctl_ask
            fi ;;
    esac
}

complete -F _skyctl skyctl
