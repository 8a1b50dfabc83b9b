"""Every code a message can carry, with what it means and the way out.

docs/errors.md is generated from this table (`python -m launcher.cli.docs errors`).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Code(NamedTuple):
    """What one code stands for."""

    meaning: str
    way_out: str


CODES: Final[dict[str, Code]] = {
    # The file.
    "HF001": Code("The job file cannot be read.", "Check the path and its permissions."),
    "HF002": Code("The job file is not UTF-8 text, or over 1 MiB.", "Save it as UTF-8."),
    "HF003": Code("The job file is not YAML.", "Mend the line named; indent with spaces."),
    "HF004": Code("The job file is empty.", "Start from examples/tiny-cpu.yaml."),
    "HF005": Code("The job file is not a mapping of sections.", "Write `name: ...` and so on."),
    "HF006": Code("A key is there twice.", "Keep one of the two."),
    "HF007": Code(
        "A YAML feature that job files do not have (tags, merge keys, several documents).",
        "Write the values out.",
    ),
    "HF008": Code("A --set that cannot be applied.", "Write --set section.key=value."),
    # Keys and values.
    "HF010": Code("An unknown key.", "Use the nearest known one; `holdfast schema` lists all."),
    "HF011": Code("A required key is missing.", "Add it."),
    "HF012": Code("A value of the wrong type.", "Write what is expected."),
    "HF013": Code("A number out of its range.", "Use one within the range."),
    "HF014": Code("A value that is none of the choices.", "Use one of those listed."),
    "HF015": Code("A text of the wrong form.", "Write it in the form shown."),
    "HF016": Code("Two keys that contradict each other.", "Keep one of them."),
    # The model.
    "HF020": Code("An unknown model.", "Use a preset, dimensions, or a path of a config.json."),
    "HF021": Code("The model's config.json cannot be read.", "Check the path and the JSON."),
    "HF022": Code("The model is not of the Llama family.", "Use a Llama-family model."),
    "HF023": Code("The model's dimensions contradict each other.", "Mend the one named."),
    "HF024": Code("The vocabulary is too small for the tokenizer.", "Enlarge vocab_size."),
    # The layout.
    "HF101": Code("dp x tp x pp x cp is not the number of GPUs.", "Use `dp: auto`."),
    "HF102": Code("tp does not divide the attention heads.", "Use a tp that divides them."),
    "HF103": Code("tp does not divide the KV heads.", "Use a tp that divides them."),
    "HF104": Code(
        "Tensor-parallel groups reach beyond one node.",
        "Use a smaller tp, or allow it with layout.allow_tp_across_nodes: true.",
    ),
    "HF105": Code("seq_len does not divide into 2*cp zigzag halves.", "Use another cp."),
    "HF106": Code("seq_len does not divide by tp (sequence parallel).", "Use another tp."),
    "HF107": Code("tp does not divide the vocabulary.", "Use another tp, or pad vocab_size."),
    "HF108": Code("tp does not divide the SwiGLU width.", "Use another tp."),
    "HF109": Code("More pipeline stages than layers.", "Use a smaller pp or interleave."),
    "HF110": Code("Fewer micro-batches per dp rank than stages.", "Enlarge global_batch."),
    "HF111": Code(
        "The interleaved schedule cannot run this number of micro-batches.", "Use a multiple of pp."
    ),
    "HF112": Code("global_batch is no multiple of micro_batch.", "Use a multiple."),
    "HF113": Code("Fewer micro-batches than dp ranks.", "Enlarge global_batch, or lower dp."),
    "HF114": Code("dp_replicate does not divide dp.", "Use a divisor of dp."),
    "HF115": Code("A zero-bubble schedule.", "Use 1f1b or interleaved."),
    "HF116": Code("`dp: auto` has no solution.", "Use the number of nodes named."),
    "HF117": Code("layout.order does not name the four axes once each.", "Reorder them."),
    "HF118": Code("schedule and interleave contradict each other.", "Change one of them."),
    "HF119": Code("Tied embeddings with more than one pipeline stage.", "Use pp 1."),
    # Cluster, elasticity.
    "HF120": Code("elastic.min_nodes is more than the cluster has.", "Lower it."),
    "HF122": Code("An unknown GPU.", "Use one of the names listed, or cpu."),
    "HF123": Code("Peers would count as dead between two heartbeats.", "Raise dead_after_s."),
    "HF125": Code("Fewer nodes than the last rung needs.", "Ask for more nodes."),
    # Warnings: the job is legal.
    "HF150": Code("Tensor-parallel groups reach beyond one node, as allowed.", "Mind the speed."),
    "HF151": Code("Nodes below the last rung cannot be used.", "See `holdfast plan`."),
    "HF152": Code("dp does not divide the micro-batches: padding idles.", "Use a multiple."),
    "HF153": Code("The warm-up is longer than the run.", "Lower warmup_steps."),
    "HF154": Code("seq_len exceeds the context the model was published for.", "Use RoPE scaling."),
    "HF155": Code("Snapshots do not fit the nodes' memory: none are taken.", "Save more often."),
    "HF156": Code("Snapshots take longer than steps: they are taken less often.", "Accept it."),
    "HF157": Code(
        "Replicas are to be compared, but there are too few.", "Use dp_replicate: 3 or more."
    ),
    "HF158": Code("A setting of a manifest that works in some clusters only.", "Check yours."),
    "HF159": Code("The first worker that ends well ends the job.", "Use `holdfast render`."),
    # Slurm.
    "HF160": Code(
        "Save, shut-down, signal and time limit do not fit into each other.",
        "Use the numbers named.",
    ),
    "HF161": Code("The cluster's Slurm is too old for an option.", "State slurm.version."),
    "HF162": Code("An option of sbatch that slurm.extra cannot give.", "Use its own key."),
    "HF163": Code("A secret in the job file.", "Name a file or a variable in env.secrets."),
    "HF164": Code("Image and container runtime do not go together.", "Set slurm.container."),
    "HF165": Code("An environment variable that cannot be set.", "Leave it out."),
    "HF166": Code("A path that scripts and manifests cannot carry.", "Use another place."),
    # The machine, looked at by `check --to local` and `run`.
    "HF201": Code("A path does not exist.", "Create it, or mend the path."),
    "HF202": Code("A path cannot be read.", "Grant the permission."),
    "HF203": Code("There is no data where data.path points.", "Point it at a file or folder."),
    "HF204": Code("A folder cannot be written.", "Choose another, or grant the permission."),
    "HF205": Code("The target cannot do this yet.", "Use what it can do."),
    "HF206": Code("An unknown target.", "Use one of those listed."),
    "HF207": Code("checkpoint.dir has the checkpoints of another run.", "Use one of its own."),
    # Checkpoints, on the nodes.
    "HF301": Code("No checkpoint on the board can be used.", "See which are damaged, and why."),
    "HF302": Code("The board cannot be read.", "Check the run directory's file system."),
    "HF303": Code("A checkpoint of another global batch.", "Use the one it was made with."),
    "HF304": Code("The checkpoint a run starts from cannot be used.", "Use another step."),
    # Checkpoints out to and in from Hugging Face's format.
    "HF320": Code("The checkpoint to export is damaged.", "Export another, or bring files back."),
    "HF321": Code("The target of an export or import is there already.", "Name a new one."),
    "HF322": Code("The target of an export or import cannot be written.", "Make room, or move."),
    "HF323": Code("A file of the model cannot be read or is missing.", "Bring it there."),
    "HF324": Code("A file of the model is damaged.", "Download it again; compare its sha256."),
    "HF325": Code(
        "The files' tensors are not those of the config.", "Use the config that belongs to them."
    ),
    "HF326": Code("A tensor of a dtype that is not read.", "Convert to F32, BF16 or F16."),
    "HF327": Code("The checkpoint is of another model.", "Use the dimensions of its run."),
    "HF328": Code("Wrong options of the converter.", "Use `holdfast checkpoint`."),
    # The agent's command line.
    "HF501": Code("Wrong flags of `holdfast agent`.", "See `holdfast agent --help`."),
    "HF502": Code("job.json cannot be used.", "Render the job again."),
    "HF503": Code("There is no such script.", "Mend the path, on every node."),
    "HF510": Code("A flag of torchrun that does not exist here.", "Use what the message names."),
    "HF511": Code(
        "An unknown placeholder in a script's arguments.",
        "Use one of those listed; double the braces for the text itself.",
    ),
    "HF504": Code("The network section does not fit a node.", "Mend interface, cidr or ports."),
    "HF520": Code(
        "The run's secret cannot be made or used.", "Delete the file while no agent runs."
    ),
    "HF521": Code(
        "The run's board is elsewhere, or --board is no address.", "Name the board it has."
    ),
    # The API for one's own loop.
    "HF530": Code("api.start() without a process group.", "Call init_process_group() first."),
    "HF531": Code("A script's state could not be kept.", "See checkpoint.failed in the events."),
    "HF532": Code("Plain parameters differ between ranks.", "Seed ranks alike, or use DTensors."),
    # `run` and `report`: faults, run directories, pictures.
    "HF601": Code(
        "A --fault of another form.", "Write ACTION[:TARGET]@STEP[/PHASE], as kill-node:2@30."
    ),
    "HF602": Code("A --fault with a wrong target.", "Use a node or rank of the run."),
    "HF603": Code("A --fault outside the run's steps.", "Use a step before the last one."),
    "HF604": Code("A --chaos of another form.", "Write SEED,MEAN_S or SEED,MEAN_S,RETURN_S."),
    "HF610": Code("Options that exclude each other.", "Leave one of them out."),
    "HF611": Code("The run directory is in use already.", "Use --resume, or another --run-dir."),
    "HF612": Code("A folder or file of the run cannot be written.", "Choose another place."),
    "HF613": Code("Not a run directory, or one that cannot be read.", "Give one under ./runs."),
    "HF614": Code("Too few or too many nodes for a run.", "Use the number named."),
    "HF615": Code("The run has a live job already.", "Stop it, or start another run."),
    "HF630": Code("There is no such checkpoint.", "Name one that is listed."),
    "HF631": Code("A checkpoint is damaged.", "Bring the files back, or use another step."),
    "HF632": Code("A package is missing that this command needs.", "Install the extra named."),
    "HF633": Code("A run cannot start from that checkpoint.", "Set the key back, or start anew."),
    "HF640": Code("The code is too large to be frozen.", "Leave data out with code.exclude."),
    "HF641": Code("A file of the code cannot be copied.", "Grant the permission, or exclude it."),
    "HF642": Code("The run has no frozen code to upgrade.", "Leave --upgrade out."),
    "HF643": Code("The run cannot be given to that group.", "Use a group that you are in."),
    "HF660": Code("No such check.", "Use one of those listed."),
    "HF661": Code("A partition or nodes that Slurm does not know.", "See `sinfo`."),
    "HF662": Code("Nothing of the run runs where it is wanted.", "See `holdfast status`."),
    "HF620": Code("A report cannot be drawn in this format.", "Write .html."),
    # Platforms: submitting, watching, cancelling.
    "HF650": Code("A program that the platform's commands need is missing.", "Install it."),
    "HF651": Code("A name that means several runs.", "Name one of them."),
    "HF652": Code("The platform refuses the job; nothing was submitted.", "Mend what it names."),
    # Kubernetes: reaching a cluster, what it refuses.
    "HF750": Code("There is no kubeconfig that can be used.", "Bring one, or set KUBECONFIG."),
    "HF751": Code("The kubeconfig has no such context.", "Use one of those listed."),
    "HF752": Code("The cluster does not accept the credentials.", "Log in again."),
    "HF753": Code("A right is missing on the cluster.", "Have the Role named granted."),
    "HF754": Code("The cluster does not know this kind of job.", "Install what is named."),
    "HF755": Code("There is no such namespace.", "Make it, or mend kubernetes.namespace."),
    "HF756": Code("A quota forbids it.", "Ask for less, or end other jobs."),
    "HF757": Code("Kubernetes refuses a document.", "Mend what it names."),
    "HF758": Code("An object of that name belongs to something else.", "Use another name."),
    "HF759": Code("The pods' storage cannot be reached.", "Mend what keeps a pod from it."),
    # The batch script's helpers.
    "HF670": Code("The run is live in another job.", "Cancel that job, or wait for its end."),
    "HF671": Code("A job has failed too often.", "See why; then `submit --resume`."),
    "HF672": Code("Attempts fail without a new checkpoint.", "See why, or give more time."),
    "HF673": Code("Not inside a Slurm job.", "Only the batch script calls this."),
    "HF674": Code("Not inside a pod of a job.", "Only the pods of a rendered job call this."),
    "HF675": Code("The run directory is another run's.", "Give each run a directory of its own."),
    "HF653": Code("The run was never submitted.", "Use what the message names."),
    "HF654": Code("A --sweep that cannot be submitted.", "Mend what the message names."),
    "HF655": Code(
        "A --set of --resume that changes more than what is asked of the platform.",
        "Start a new run from this one (--from).",
    ),
    # The trainer, on the nodes.
    "HF701": Code("The corpus cannot be read.", "Make data.path readable on every node."),
    "HF702": Code("The corpus is empty or too short.", "Use a longer one, or a smaller seq_len."),
    "HF703": Code("A token outside the vocabulary.", "Use the tokenizer it was made with."),
    "HF704": Code("The tokenizer cannot be used.", "Name a tokenizer.json, or use bytes."),
    "HF705": Code("A data format the trainer cannot read.", "Use text, nanogpt or megatron."),
    "HF706": Code("Another corpus than the one the run began with.", "Put the former one back."),
    "HF707": Code("The corpus's files are damaged.", "Copy them again, or make them again."),
    "HF711": Code("The numbers of a step are wrong, and the job is to stop.", "See `numbers`."),
    # Kubernetes: what `check` finds in manifests; more from HF730.
    "HF712": Code("A disruption budget that lets no pod go.", "Use minAvailable, a number."),
    "HF713": Code("RDMA without the right to lock memory.", "Add the capability IPC_LOCK."),
    "HF715": Code("A key that the API server drops without a word.", "Use the nearest known one."),
    "HF716": Code("A secret in a manifest.", "Use valueFrom.secretKeyRef."),
    "HF718": Code("WORLD_SIZE would count pods, not workers.", "Give nprocPerNode as a number."),
    # Kubernetes: what a job file lacks to be rendered.
    "HF720": Code("No container image for the pods.", "Set kubernetes.image."),
    "HF721": Code("No storage that all pods share.", "Set kubernetes.claim."),
    "HF722": Code("A path that pods do not have.", "Mount it: kubernetes.volumes."),
    "HF723": Code("A secret that pods cannot read.", "Add {kubernetes: NAME/KEY} to it."),
    "HF724": Code("Gang scheduling that this kind of job does not have.", "Use a queue."),
    "HF725": Code("A pod's memory is no more than its /dev/shm.", "Raise kubernetes.memory."),
    "HF726": Code("job.json is too long for a ConfigMap.", "Raise elastic.min_nodes."),
    # Kubernetes: what `check` finds in manifests.
    "HF730": Code(
        "A document that is no Kubernetes object.", "Give apiVersion, kind and metadata."
    ),
    "HF731": Code(
        "A value that the server takes and the operator does not know.", "Use one listed."
    ),
    "HF732": Code("Numbers of replicas that contradict each other.", "Use min <= replicas <= max."),
    "HF733": Code(
        "Exit codes decide, but the command has always the same.", "Use `holdfast render`."
    ),
    "HF734": Code("An elastic job with a Master.", "Use workers alone."),
    "HF735": Code("Workers that do not find each other, or not again.", "Add an elasticPolicy."),
    "HF736": Code("One restart of each pod uses up backoffLimit.", "Raise it."),
    "HF737": Code("Pods that outlive the job keep their GPUs.", "Use cleanPodPolicy: Running."),
    "HF739": Code("An autoscaler for a job of fixed layouts.", "Leave metrics out."),
    "HF740": Code("A suspended job that nobody will start.", "Add the queue's label."),
    "HF741": Code("A pod that the operator's webhook refuses.", "Mend what is named."),
    "HF742": Code("Two keys for the workers of a pod.", "Keep spec.nprocPerNode."),
    "HF744": Code("One lost pod would restart them all.", "Use `holdfast render`."),
    "HF745": Code("A name that is too long or of the wrong form.", "Shorten it."),
    "HF746": Code("Shared memory is too small, endless or too large.", "Mount memory there."),
    "HF747": Code("A pod is killed before it could save.", "Raise the grace period."),
    "HF748": Code("Variables that the operator sets itself.", "Leave them out."),
    "HF749": Code("Storage that one node alone can mount.", "Use access mode ReadWriteMany."),
}
"""Code -> meaning and way out. A code, once released, keeps its meaning."""

WARNINGS: Final = frozenset(code for code in CODES if code.startswith("HF15"))
"""Codes that never stop a job."""
