"""Every code a message can carry, with what it means and how to fix it.

docs/errors.md is generated from this table (`python -m launcher.cli.docs errors`).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class CodeInfo(NamedTuple):
    """What one code stands for."""

    meaning: str
    how_to_fix: str


_TABLE: Final = {
    # The file.
    "HF001": ("The job file cannot be read.", "Check the path and its permissions."),
    "HF002": ("The job file is not UTF-8 text, or over 1 MiB.", "Save it as UTF-8, under 1 MiB."),
    "HF003": ("The job file is not YAML.", "Fix the line named; indent with spaces."),
    "HF004": ("The job file is empty.", "Start from examples/tiny-cpu.yaml."),
    "HF005": ("The job file is not a mapping of sections.", "Write `name: ...` and so on."),
    "HF006": ("A duplicate key.", "Keep one of the two."),
    "HF007": (
        "A YAML feature that job files do not have (tags, merge keys, several documents).",
        "Write the values out.",
    ),
    "HF008": ("A --set that cannot be applied.", "Write --set section.key=value."),
    # Keys and values.
    "HF010": ("An unknown key.", "Use the nearest known one; `holdfast schema` lists all."),
    "HF011": ("A required key is missing.", "Add it."),
    "HF012": ("A value of the wrong type.", "Use the type named."),
    "HF013": ("A number out of range.", "Use one within the range."),
    "HF014": (
        "A value that is not one of the choices.",
        "Use one of them; `holdfast schema` lists all.",
    ),
    "HF015": ("A string of the wrong form.", "Use the form shown."),
    "HF016": ("Two keys contradict each other.", "Keep one of them."),
    # The model.
    "HF020": ("An unknown model.", "Use a preset, dimensions, or a path of a config.json."),
    "HF021": ("The model's config.json cannot be read.", "Check the path and the JSON."),
    "HF022": (
        "The model is of a family, or has a feature, that is not trained here.",
        "Use a model of another family (docs/models.md), a plug-in or a script.",
    ),
    "HF023": ("The model's dimensions contradict each other.", "Fix the one named."),
    "HF026": (
        "The model's parameters cannot be counted: transformers is not installed here.",
        "Install holdfast-ml[train,hf] here, or state model.params.",
    ),
    "HF024": ("The vocabulary is too small for the tokenizer.", "Enlarge vocab_size."),
    # The layout.
    "HF101": ("dp x tp x pp x cp is not the number of GPUs.", "Use `dp: auto`."),
    "HF102": (
        "tp does not divide the attention heads (and what else the message names).",
        "Use a tp that divides all.",
    ),
    "HF103": ("tp does not divide the KV heads.", "Use a tp that divides them."),
    "HF104": (
        "Tensor-parallel groups span nodes.",
        "Use a smaller tp, or allow it with layout.allow_tp_across_nodes: true.",
    ),
    "HF105": ("seq_len does not divide into 2*cp zigzag halves.", "Use another cp."),
    "HF106": ("seq_len does not divide by tp (sequence parallel).", "Use another tp."),
    "HF107": ("tp does not divide the vocabulary.", "Use another tp, or pad vocab_size."),
    "HF108": ("tp does not divide the SwiGLU width.", "Use another tp."),
    "HF109": ("More pipeline stages than layers.", "Use a smaller pp or interleave."),
    "HF110": ("Fewer micro-batches per dp rank than stages.", "Enlarge global_batch."),
    "HF111": (
        "The interleaved schedule cannot run this number of micro-batches.",
        "Use a multiple of pp, or another number that it splits into equal groups.",
    ),
    "HF112": ("global_batch is not a multiple of micro_batch.", "Use a multiple."),
    "HF113": ("Fewer micro-batches than dp ranks.", "Enlarge global_batch, or lower dp."),
    "HF114": ("dp_replicate does not divide dp.", "Use a divisor of dp."),
    "HF115": ("A zero-bubble schedule.", "Use 1f1b or interleaved."),
    "HF116": ("`dp: auto` has no solution.", "Use the number of nodes named."),
    "HF117": ("layout.order does not name the four axes once each.", "Reorder them."),
    "HF118": ("schedule and interleave contradict each other.", "Change one of them."),
    # Cluster, elasticity.
    "HF120": ("elastic.min_nodes is more than the cluster has.", "Lower it."),
    "HF121": ("ep does not divide the experts of a layer.", "Use a divisor of both."),
    "HF122": ("An unknown GPU.", "Use one of the names listed, or cpu."),
    "HF123": ("Peers would be declared dead between two heartbeats.", "Raise dead_after_s."),
    "HF124": ("ep does not divide dp / dp_replicate.", "Use a divisor of both."),
    "HF125": ("Fewer nodes than the smallest layout needs.", "Ask for more nodes."),
    "HF126": (
        "More GPUs per node than machines with this GPU have.",
        "Use more nodes of fewer GPUs.",
    ),
    "HF127": (
        "Checkpoints in a folder of one node.",
        "Use a folder on storage that all nodes share.",
    ),
    "HF128": ("An address that other nodes cannot reach.", "Use another interface, or auto."),
    "HF129": ("Too few ports for an agent.", "Use a wider range, as 29400-29499."),
    "HF130": ("train.compile with layout.ep above 1.", "Use ep 1, or compile: false."),
    "HF131": (
        "The layout does not fit the memory of its GPUs.",
        "Recompute more, shard further, or use more nodes.",
    ),
    "HF132": (
        "train.float8 with dimensions that 16 does not divide.",
        "Use a smaller tp, or bf16.",
    ),
    "HF133": (
        "train.float8 where it cannot be: fp32, experts, a plug-in, a GPU without float8.",
        "Use train.float8: false.",
    ),
    "HF134": (
        "train.compile with tp and recompute full.",
        "Use recompute selective, or compile: false.",
    ),
    "HF135": (
        "elastic.sizes lacks cluster.nodes, or has sizes outside min_nodes to nodes.",
        "List the numbers of nodes to train on, that of the cluster among them.",
    ),
    "HF136": (
        "`layout: auto` of a job whose speed is not known: a script, or a GPU without figures.",
        "Write the degrees, or measure the GPU by `holdfast calibrate`.",
    ),
    "HF138": ("The profile is of another GPU.", "Use one of the job's GPU, or calibrate."),
    "HF140": (
        "Something that a model of transformers' own class does not take.",
        "Leave it out, or use a model that a family here has (docs/models.md).",
    ),
    # Warnings: the job is legal.
    "HF150": ("Tensor-parallel groups span nodes, as allowed.", "Expect lower speed."),
    "HF151": ("Nodes below the smallest layout cannot be used.", "See `holdfast plan`."),
    "HF152": ("dp does not divide the micro-batches: padding idles.", "Use a multiple."),
    "HF153": ("The warm-up is longer than the run.", "Lower warmup_steps."),
    "HF154": ("seq_len exceeds the context the model was published for.", "Use RoPE scaling."),
    "HF155": ("Snapshots do not fit the nodes' memory: none are taken.", "Save more often."),
    "HF156": ("Snapshots take longer than steps: they are taken less often.", "Accept it."),
    "HF157": (
        "Replicas are to be compared, but there are too few.",
        "Use dp_replicate: 3 or more.",
    ),
    "HF158": ("No checkpoint before the end.", "Set checkpoint.every_s."),
    "HF159": ("Checkpoints come faster than they can be saved.", "Raise checkpoint.every_s."),
    "HF170": ("A learning rate far above what AdamW bears.", "Lower lr."),
    "HF171": ("A comma list with blanks, or in one text.", "Write it as the message shows."),
    "HF172": ("More spares than nodes that train.", "Lower cluster.spares."),
    "HF173": (
        "No fabric is named for several nodes: NCCL may fall back to TCP.",
        "Set fabric, or NCCL_NET in env.variables.",
    ),
    "HF174": (
        "kubernetes.fabric and kubernetes.rdma do not go together.",
        "Give both, with the resource that the cluster's device plugin has, or none.",
    ),
    "HF175": (
        "CPUs or memory are not asked for.",
        "State how many CPUs and how much memory a node gives.",
    ),
    "HF176": ("Fewer CPUs than GPUs.", "Ask for several CPUs a GPU."),
    "HF177": ("An image whose content may change.", "Name a version or a digest."),
    "HF178": ("Checkpoints are lost with the node.", "Use a folder on storage that outlives it."),
    "HF179": (
        "Files that hold keys or passwords are not frozen with the code.",
        "Use env.secrets, or name a file in code.include.",
    ),
    # The cluster, asked before a job is submitted: what it waits for.
    "HF180": ("The partition is down: the job waits.", "Use another, or wait."),
    "HF181": ("A quota has no room for all pods.", "Ask for less, or end other jobs."),
    "HF182": (
        "The cluster's nodes have no room for all pods.",
        "Ask for less, unless nodes are added on demand.",
    ),
    "HF183": ("A policy refuses a pod of the job.", "Fix what it names."),
    "HF184": ("A pull secret of the image does not exist.", "Create it, or fix the name."),
    "HF185": ("A claim that one node can mount.", "Use one that is ReadWriteMany."),
    "HF186": ("The plug-in's module is not in code.dir.", "Put it there, or on every node."),
    "HF188": (
        "Machines that the fleet's ledger keeps the job off.",
        "See `holdfast nodes history`; `holdfast nodes release` once repaired.",
    ),
    "HF189": (
        "The fleet's ledger could not keep the job off bad machines.",
        "Free or repair machines; see `holdfast nodes list`.",
    ),
    "HF190": ("train.float8 without train.compile is slow.", "Set train.compile: true."),
    "HF191": (
        "A special token outside the vocabulary, which a text can name.",
        "Keep it out of the texts, or enlarge vocab_size.",
    ),
    "HF192": (
        "The data's tokenizer is not that of the imported model.",
        "Use the model's, unless its tokens were replaced on purpose.",
    ),
    "HF193": (
        "A model's config.json contradicts the tokenizer about special tokens.",
        "Fix the ids that are wrong.",
    ),
    "HF195": (
        "The profile is of nodes or layers of another kind.",
        "Calibrate again with the job.",
    ),
    "HF196": ("The job is far beyond what its profile measured.", "Take predictions with care."),
    "HF197": (
        "Far fewer spares than pay for themselves on Slurm.",
        "Raise cluster.spares; see `holdfast simulate`.",
    ),
    "HF198": (
        "No family here has the model of a config.json: transformers' own class trains it.",
        "Say that it is meant: model: {hf: PATH}.",
    ),
    "HF187": ("Validation on what is trained on.", "Hold data out, and name it."),
    # Slurm.
    "HF160": (
        "Save, shut-down, signal and time limit do not fit together.",
        "Use the numbers named.",
    ),
    "HF161": ("The cluster's Slurm is too old for an option.", "State slurm.version."),
    "HF162": ("An option of sbatch that slurm.extra cannot give.", "Use its own key."),
    "HF163": ("A secret in the job file.", "Name a file or a variable in env.secrets."),
    "HF164": ("Image and container runtime do not go together.", "Set slurm.container."),
    "HF165": ("An environment variable that cannot be set.", "Leave it out."),
    "HF166": ("A path that scripts and manifests cannot carry.", "Use another place."),
    "HF167": ("A failure domain that Slurm does not know.", "Count levels: 1, 2."),
    "HF168": (
        "slurm.gres or slurm.gpu_type asks for other GPUs than the cluster section.",
        "Ask for the same GPUs in both.",
    ),
    "HF169": ("A batch script or a manifest that cannot be wrapped.", "Change the line named."),
    # The machine, looked at by `check --to local` and `run`.
    "HF201": ("A path does not exist.", "Create it, or fix the path."),
    "HF202": ("A path cannot be read.", "Grant the permission."),
    "HF203": ("No data at data.path.", "Point it at a file or folder."),
    "HF204": ("A folder cannot be written.", "Choose another, or grant the permission."),
    "HF205": ("The target cannot do this yet.", "Use what it can do."),
    "HF206": ("An unknown target.", "Use one of those listed."),
    "HF207": ("checkpoint.dir has the checkpoints of another run.", "Use one of its own."),
    "HF208": ("An unknown site.", "Use one of those listed, or add it to sites.yaml."),
    "HF209": ("A wrong file of sites.", "Fix the site named."),
    "HF210": (
        "A site cannot be reached over SSH.",
        "See what ssh says; `ssh HOST true` must work.",
    ),
    "HF211": ("A site over SSH has no holdfast.", "Install it there, or name its path."),
    "HF212": ("A site over SSH has another version.", "Use the same version here and there."),
    "HF213": ("There is no such profile.", "Use one of those listed, or run `holdfast calibrate`."),
    "HF214": ("A damaged profile, or one of another version.", "Run `holdfast calibrate` again."),
    "HF215": ("The nodes could not be measured.", "Fix what the message names."),
    # Checkpoints, on the nodes.
    "HF301": ("No checkpoint on the board can be used.", "See which are damaged, and why."),
    "HF302": ("The board cannot be read.", "Check the run directory's file system."),
    "HF303": ("A checkpoint of another global batch.", "Use the one it was made with."),
    "HF304": ("The checkpoint a run starts from cannot be used.", "Use another step."),
    "HF305": ("The last state could not be saved.", "Let checkpoint.dir be written, and resume."),
    # Checkpoints out to and in from Hugging Face's format.
    "HF320": ("The checkpoint to export is damaged.", "Export another step, or restore the files."),
    "HF321": ("The target of an export or import is there already.", "Name a new one."),
    "HF322": ("The target of an export or import cannot be written.", "Make room, or move."),
    "HF323": ("A file of the model cannot be read or is missing.", "Put it there."),
    "HF324": ("A file of the model is damaged.", "Download it again; compare its sha256."),
    "HF325": (
        "The files' tensors are not those of the config.",
        "Use the config that belongs to them.",
    ),
    "HF326": ("A tensor of an unsupported dtype.", "Convert to F32, BF16 or F16."),
    "HF327": ("The checkpoint is of another model.", "Use the dimensions of its run."),
    "HF328": (
        "A plug-in says nothing of its Hugging Face form.",
        "Give its class hf_config and hf_names.",
    ),
    "HF329": (
        "A weight of the model is NaN or infinite.",
        "Download the file again; compare its sha256.",
    ),
    # A job's own model (`model.plugin`), on the nodes.
    "HF330": ("The plug-in cannot be imported.", "Fix the module, or model.plugin."),
    "HF331": ("The plug-in is not a decoder as the trainer needs it.", "See docs/models.md."),
    "HF332": ("The plug-in has another number of parameters.", "Set model.params."),
    "HF333": ("train.float8 on a node without torchao.", "Install holdfast-ml[float8]."),
    # A model of transformers' own class (`model: {hf: ...}`), on the nodes.
    "HF334": ("transformers is not installed on a node.", "Install holdfast-ml[hf] there."),
    "HF335": (
        "transformers' class cannot be trained on a node as it was planned.",
        "Use the transformers there that the job was submitted with; see the message.",
    ),
    "HF336": ("train.lora on a node without peft.", "Install holdfast-ml[lora] there."),
    # The agent's command line.
    "HF501": ("Wrong flags of `holdfast agent`.", "See `holdfast agent --help`."),
    "HF502": ("job.json cannot be used.", "Render the job again."),
    "HF503": ("The script does not exist.", "Fix the path, on every node."),
    "HF510": ("A torchrun flag that is not supported.", "Use what the message names."),
    "HF511": (
        "An unknown placeholder in a script's arguments.",
        "Use one of those listed; double the braces for the text itself.",
    ),
    "HF512": (
        "The port of --master-port cannot be had, or nobody would listen on it.",
        "Give another port, or leave it out and use init_method=env://.",
    ),
    "HF513": ("--numa-binding cannot be done.", "See the message; leave it out."),
    "HF517": (
        "A script began at its first step again, for the second time in a row.",
        "Have it resume from its checkpoint, or set `elastic.from_scratch`.",
    ),
    "HF504": ("The network section does not fit a node.", "Fix interface, cidr or ports."),
    "HF505": ("A node lacks the fabric.", "Repair or exclude the node, or fix `fabric`."),
    "HF520": ("The run's secret cannot be made or used.", "Delete the file while no agent runs."),
    "HF521": (
        "The run's board is elsewhere, or --board is not an address.",
        "Name the board it has.",
    ),
    "HF522": (
        "The job of an agent is done already.",
        "Name another --rdzv-id to run it again; --if-done ok ends with 0.",
    ),
    "HF523": (
        "The folder of a running job was removed and cannot be made again.",
        "Make its storage available with write permission, and start the job again.",
    ),
    "HF527": (
        "Agents of one job differ in what they must have in common, as workers per node.",
        "Start all with the same flags and the same version.",
    ),
    "HF528": (
        "Agents of one job differ in what may differ, as a script's arguments; they train.",
        "Make them equal if that is not meant.",
    ),
    # The API for one's own loop.
    "HF530": ("holdfast.start() without a process group.", "Call init_process_group() first."),
    "HF531": ("A script's state could not be kept.", "See checkpoint.failed in the events."),
    "HF532": ("Plain parameters differ between ranks.", "Seed ranks alike, or use DTensors."),
    "HF533": (
        "An object's kept state is missing or does not fit.",
        "Give restore what was given before.",
    ),
    "HF534": ("A script's state dict cannot be kept.", "Keep plain values that do not grow."),
    "HF535": ("The batch cannot be kept on fewer ranks.", "Accumulate more, or fix the nodes."),
    "HF536": (
        "A framework is set up in a way that its integration does not cover.",
        "Use what the message names, or the framework's checkpoints.",
    ),
    "HF537": (
        "A script's trainings overlap, or differ between ranks.",
        "Finish one, then start the next.",
    ),
    "HF538": (
        "It cannot be told which training of the run a script begins.",
        "Begin the same trainings in the same order, with the same names.",
    ),
    "HF539": (
        "A step after the end of a training that was finished.",
        "Loop while not run.finished.",
    ),
    # `run` and `report`: faults, run directories, pictures.
    "HF601": ("A malformed --fault.", "Write ACTION[:TARGET]@STEP[/PHASE], as kill-node:2@30."),
    "HF602": ("A --fault with a wrong target.", "Use a node or rank of the run."),
    "HF603": ("A --fault outside the run's steps.", "Use a step before the last one."),
    "HF604": ("A malformed --chaos.", "Write SEED,MEAN_S or SEED,MEAN_S,RETURN_S."),
    "HF610": ("Options that exclude each other.", "Leave one of them out."),
    "HF611": ("The run directory is in use already.", "Use --resume, or another --run-dir."),
    "HF612": ("A folder or file of the run cannot be written.", "Choose another place."),
    "HF613": ("Not a run directory, or one that cannot be read.", "Give one under ./runs."),
    "HF614": ("Too few or too many nodes for a run.", "Use the number named."),
    "HF615": ("The run has a live job already.", "Stop it, or start another run."),
    "HF616": ("Other users can change the run directory.", "Use one of your own."),
    "HF617": (
        "The file system lacks what a run needs: hard links, owners, modes.",
        "Use a directory on NFS, Lustre, GPFS or a disk.",
    ),
    "HF630": ("The checkpoint does not exist.", "Name one that is listed."),
    "HF631": ("A checkpoint is damaged.", "Restore the files, or use another step."),
    "HF632": ("A package that this command needs is missing.", "Install what is named."),
    "HF633": ("A run cannot start from that checkpoint.", "Reset the key, or start a new run."),
    "HF640": ("The code is too large to be frozen.", "Leave data out with code.exclude."),
    "HF641": ("A file of the code cannot be copied.", "Grant the permission, or exclude it."),
    "HF642": ("The run has no frozen code to upgrade.", "Leave --upgrade out."),
    "HF643": ("The run cannot be given to that group.", "Use a group that you are in."),
    "HF660": ("No such check.", "Use one of those listed."),
    "HF661": ("Slurm does not know the partition or nodes.", "See `sinfo`."),
    "HF662": ("Nothing of the run runs there.", "See `holdfast status`."),
    "HF620": ("A file cannot be written in this format.", "Use a suffix that is named."),
    # Platforms: submitting, watching, cancelling.
    "HF650": ("A program that the platform needs is missing.", "Install it."),
    "HF651": ("An ambiguous run name.", "Name one of the runs listed."),
    "HF652": ("The platform refuses the job; nothing was submitted.", "Fix what it names."),
    # Slurm, asked before a job is submitted: what sbatch takes and Slurm never starts.
    "HF680": (
        "The partition does not give a job so many nodes.",
        "Use the number named, or another partition.",
    ),
    "HF681": (
        "Too few nodes of the partition have what the job asks of each.",
        "Ask for what the message shows, or use another partition.",
    ),
    "HF682": ("A time limit longer than the partition's.", "Shorten slurm.time."),
    "HF683": ("An account or QOS that is not the user's.", "Use one of those listed."),
    "HF684": (
        "A limit of the account or QOS is below what the job alone asks for.",
        "Ask for less.",
    ),
    # Kubernetes: reaching a cluster, what it refuses.
    "HF750": ("No usable kubeconfig.", "Provide one, or set KUBECONFIG."),
    "HF751": ("The kubeconfig has no such context.", "Use one of those listed."),
    "HF752": ("The cluster rejects the credentials.", "Log in again."),
    "HF753": ("A permission is missing on the cluster.", "Have the Role named granted."),
    "HF754": ("The cluster does not know this kind of job.", "Install what is named."),
    "HF755": ("The namespace does not exist.", "Create it, or fix kubernetes.namespace."),
    "HF756": ("A quota is exceeded.", "Ask for less, or end other jobs."),
    "HF757": ("Kubernetes refuses a document.", "Fix what it names."),
    "HF758": ("An object of that name belongs to something else.", "Use another name."),
    "HF759": ("The pods' storage cannot be reached.", "Fix what the message names."),
    "HF760": ("An object that the job names does not exist.", "Create it, or fix the name."),
    # The fleet.
    "HF690": (
        "The fleet's ledger cannot be read or written.",
        "Have the command run that the message names, or name another place in cluster.fleet.",
    ),
    "HF691": ("The platform has no such machine or rack.", "Use one of those listed."),
    "HF692": (
        "The machine's check has not passed: it stays out.",
        "Repair it, or release it with --force.",
    ),
    "HF693": ("The platform cannot do this to machines.", "Use what the message names."),
    "HF694": ("There is no such runbook.", "See `holdfast runbook --list`."),
    "HF695": ("The file of targets cannot be written.", "Name another by --targets."),
    "HF699": ("There is nothing to track.", "Set `track` in the job file, or use --to."),
    "HF698": ("A job cannot be rehearsed here.", "See why its undisturbed run failed."),
    "HF697": ("There is no usable webhook.", "Set HOLDFAST_WEBHOOK, or --url-file."),
    "HF696": ("The metrics cannot be served there.", "Choose another --listen."),
    # `simulate`.
    "HF685": ("An assumption of a simulation that cannot be.", "Use a number in its range."),
    "HF686": (
        "A run's record has no recovery to take times from.",
        "Use a run that has recovered from a failure, or leave --run out.",
    ),
    # The batch script's helpers.
    "HF670": ("The run is live in another job.", "Cancel that job, or wait for its end."),
    "HF671": ("The job failed too often.", "See `holdfast why`, then `submit --resume`."),
    "HF672": ("Attempts fail without a new checkpoint.", "See `holdfast why`, or give more time."),
    "HF673": ("Not inside a Slurm job.", "Only the batch script calls this."),
    "HF674": ("Not inside a pod of a job.", "Only the pods of a rendered job call this."),
    "HF675": ("The run directory is another run's.", "Give each run a directory of its own."),
    "HF677": (
        "No agent could be started: Slurm refuses the srun, or a node cannot carry it out.",
        "Fix what the message says, then `submit --resume`.",
    ),
    "HF678": (
        "The Python that a script or a set-up names cannot run agents.",
        "Install holdfast there, or name the environment that has it.",
    ),
    "HF676": ("All pods fail again and again.", "Fix the error in their logs."),
    "HF653": ("The run was never submitted.", "Use what the message names."),
    "HF654": ("The --sweep cannot be submitted.", "Fix what the message names."),
    "HF655": (
        "A --set with --resume may only change platform requests.",
        "Start a new run from this one (--from).",
    ),
    # The trainer, on the nodes.
    "HF701": ("The corpus cannot be read.", "Make data.path readable on every node."),
    "HF702": ("The corpus is empty or too short.", "Use a longer one, or a smaller seq_len."),
    "HF703": ("A token outside the vocabulary.", "Use the tokenizer it was made with."),
    "HF704": ("The tokenizer cannot be used.", "Name a tokenizer.json, or use bytes."),
    "HF705": ("A data format the trainer cannot read.", "Use one of docs/data.md."),
    "HF706": ("The corpus is not the one the run began with.", "Restore the original corpus."),
    "HF707": ("The corpus's files are damaged.", "Copy them again, or make them again."),
    "HF708": ("A line of an SFT file that is not an example.", "Fix or remove the line named."),
    "HF709": ("SFT examples longer than seq_len.", "Raise seq_len, or set data.cut_long."),
    "HF710": ("The corpus has another format than data.format.", "Write what the message names."),
    "HF712": ("The corpus is not text in UTF-8.", "Convert it as the message says."),
    "HF713": (
        "A record of the corpus has no text.",
        "Name its key in data.key, or fix the record named.",
    ),
    "HF714": (
        "What reads parquet, Arrow and .zst is missing.",
        "Install pyarrow on the nodes: pip install 'holdfast-ml[arrow]'.",
    ),
    "HF715": (
        "Examples of sft mixed with other formats.",
        "Give all of data.mix one kind: data.format: sft, or none of it.",
    ),
    "HF711": ("Wrong numbers in a step stop the job.", "See `numbers`."),
    # Kubernetes: what a job file lacks to be rendered.
    "HF720": ("No container image for the pods.", "Set kubernetes.image."),
    "HF721": ("No storage that all pods share.", "Set kubernetes.claim."),
    "HF722": ("A path that does not exist in pods.", "Mount it: kubernetes.volumes."),
    "HF723": ("A secret that pods cannot read.", "Add {kubernetes: NAME/KEY} to it."),
    "HF724": ("This kind of job has no gang scheduling.", "Use a queue."),
    "HF725": ("A pod's memory is no more than its /dev/shm.", "Raise kubernetes.memory."),
    "HF726": ("job.json is too long for a ConfigMap.", "Raise elastic.min_nodes."),
    "HF727": ("A failure domain that pods do not know.", "Name a label of nodes."),
    "HF728": (
        "kubernetes.gpu_resource is of another vendor than cluster.gpu.",
        "Use the GPU's own.",
    ),
    "HF736": ("Fewer restarts than pods.", "Raise kubernetes.restart_limit."),
    "HF737": ("A field of pods that pod_patch cannot set.", "Use its own key."),
}
CODES: Final = {code: CodeInfo(*each) for code, each in _TABLE.items()}
"""Code -> meaning and how to fix it. A code, once released, keeps its meaning."""

WARNINGS: Final = frozenset(
    code for code in CODES if code.startswith(("HF15", "HF17", "HF18", "HF19"))
)
"""Codes of what may be meant: they stop no job, unless `holdfast check --strict` is asked."""
