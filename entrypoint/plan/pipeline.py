"""What pipeline stages and several nodes forbid in the engine, as tables (sglang/srt 0.5.23)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..checkpoint.geometry import Geometry
from .constraints import Constraints
from .plan import Infeasibility
from .sharding import Parallel

# Architectures of models/*.py whose forward takes no pp_proxy_tensors: model_runner.py refuses them with "Pipeline
# Parallel is not compatible with this model". A test reads them out of the installed engine again.
_NAMES = """
    AfmoeForCausalLM BaichuanForCausalLM BertForSequenceClassification BertModel CLIPModel ChatGLMModel
    Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration CohereForCausalLM Contriever
    DbrxForCausalLM DeepseekForCausalLM DeepseekOCRForCausalLM DeepseekVL2ForCausalLM
    DiffusionGemmaForBlockDiffusion DotsOCRForCausalLM EmbeddingGemma2Model EmbeddingGemmaModel Ernie4_5_ForCausalLM
    Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration ExaoneForCausalLM FalconH1ForCausalLM
    FalconMambaForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM Gemma2ForCausalLM
    Gemma2ForSequenceClassification Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM
    Gemma3nForConditionalGeneration Gemma4UnifiedForConditionalGeneration GemmaForCausalLM
    GlmAsrForConditionalGeneration GlmImageForConditionalGeneration GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM Grok1ForCausalLM
    Grok1ModelForCausalLM HYV3ForCausalLM HYV4ForCausalLM HrmTextForCausalLM HunYuanDenseV1ForCausalLM
    HunYuanMoEV1ForCausalLM IQuestLoopCoderForCausalLM IQuestQ1ForCausalLM InklingForConditionalGeneration
    InternLM2ForCausalLM InternLM2ForRewardModel InternS1ForConditionalGeneration InternVLChatModel
    JetNemotronForCausalLM JetVLMForConditionalGeneration KimiVLForConditionalGeneration Lfm2BidirectionalModel
    Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration LightOnOCRForConditionalGeneration
    Llama4ForConditionalGeneration LlamaEmbeddingModel LlamaForClassification LlamaForSequenceClassification
    LlamaForSequenceClassificationWithNormal_Weights LlavaLlamaForCausalLM LlavaMistralForCausalLM
    LlavaQwenForCausalLM LlavaVidForCausalLM LocateAnythingForConditionalGeneration LongcatFlashForCausalLM
    Mamba2ForCausalLM MambaForCausalLM MiDashengLMModel MiMoForCausalLM MindSporeForCausalLM MiniCPM3ForCausalLM
    MiniCPMForCausalLM MiniCPMO MiniCPMSALAForCausalLM MistralModel MllamaForConditionalGeneration
    MultiModalityCausalLM MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration
    MuseSparkForConditionalGeneration NVILAForConditionalGeneration NVILALiteForConditionalGeneration
    NanbeigeForSequenceClassification NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
    NemotronH_Omni_Reasoning_V3 Olmo2ForCausalLM OlmoForCausalLM OlmoeForCausalLM OrionForCausalLM
    POINTSV15ChatModel PaddleOCRVLForConditionalGeneration PersimmonForCausalLM Phi3SmallForCausalLM
    Phi4MMForCausalLM PhiForCausalLM PhiMoEForCausalLM PixtralForConditionalGeneration PixtralVisionModel
    QWenLMHeadModel QuantMixtralForCausalLM Qwen2AudioForConditionalGeneration Qwen2ForRewardModel
    Qwen2ForSequenceClassification Qwen2VLForConditionalGeneration Qwen3ASRForConditionalGeneration
    Qwen3ForRewardModel Qwen3ForSequenceClassification Qwen3Model Qwen3NextForCausalLM Sarashina2VisionForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM Step3VLForConditionalGeneration Step3p7ForConditionalGeneration
    StepVLForConditionalGeneration TorchNativeLlamaForCausalLM TorchNativePhi3ForCausalLM UnlimitedOCRForCausalLM
    VoxtralForConditionalGeneration WhisperForConditionalGeneration XLMRobertaForSequenceClassification
    XLMRobertaModel XverseForCausalLM XverseMoeForCausalLM YiVLForCausalLM
    """
WHOLE = frozenset(_NAMES.split())
# Draft stages: the engine's switch for drafts on the last stage (arg_groups/validation_hook.py).
DRAFT_SWITCH = "SGLANG_ENABLE_PP_SPEC"
PARTITION = "SGLANG_PP_LAYER_PARTITION"
# Engine flags (argparse dest) that a pipeline forbids, the values that it takes all the same, and who says so.
_PIPELINE = {
    "min_free_slots_delay": ((), "arg_groups/validation_hook.py:check_pipeline_parallel_compat"),
    "enable_pdmux": ((), "arg_groups/validation_hook.py:check_server_args"),
    "enable_return_aux_hidden_states": ((), "arg_groups/validation_hook.py"),
    "enable_layernorm_sp": ((), "arg_groups/layernorm_sp_hook.py"),
    "enable_dsa_cache_layer_split": ((), "arg_groups/model_hook.py"),
    "moe_dp_size": (("1",), "arg_groups/parallel_hook.py"),
    "elastic_ep_backend": (("none",), "arg_groups/parallel_hook.py"),
    "mm_feature_transport": (("cpu", "cuda_ipc"), "arg_groups/serving_hook.py"),
}
_NODES = {
    "dp_size": (("1",), "arg_groups/validation_hook.py:check_server_args"),
    "mm_feature_transport": (("cpu", "cuda_vmm"), "arg_groups/serving_hook.py"),
}
_ONE_STAGE: tuple[Mapping[str, Any], ...] = ({"pp": 1}, {"pp": 1, "tp": None})


def possible(constraints: Constraints, g: Geometry) -> bool:
    """Whether the planner may choose stages by itself."""
    return next(problems(constraints, g, 2, 1), None) is None


def problems(constraints: Constraints, g: Geometry, pp: int, nodes: int) -> Iterator[Infeasibility]:
    """Why ``pp`` stages over ``nodes`` nodes cannot be started with this model and these constraints."""
    if nodes > 1:
        yield from _flags(constraints, _NODES, f"NNODES={nodes}", ({"nnodes": 1},))
    if pp < 2:
        return
    if g.architecture in WHOLE:
        yield Infeasibility(f"PP={pp}: the engine cannot cut {g.architecture} into stages", _ONE_STAGE)
    elif g.architecture == "LlamaForCausalLM" and g.tied:
        # models/llama.py ties lm_head to an embedding that the last stage does not have.
        yield Infeasibility(
            f"PP={pp}: the engine keeps a tied Llama's embedding on the first stage alone, and the last one needs it",
            _ONE_STAGE,
        )
    draft = constraints.value("speculative") == "mtp"
    if (draft or constraints.engine_arg("speculative_algorithm")) and constraints.engine_env(DRAFT_SWITCH) not in (
        "1",
        "true",
    ):
        asked = "SPECULATIVE=mtp" if draft else "--speculative-algorithm"
        fixes = ({"speculative": "off"} if draft else {"--speculative-algorithm": None}, *_ONE_STAGE)
        yield Infeasibility(f"{asked} with PP={pp}: the engine drafts in a pipeline only with {DRAFT_SWITCH}=1", fixes)
    elif draft and int(constraints.value("dp_attention", 1)) > 1:
        text = f"SPECULATIVE=mtp with PP={pp} and DP_ATTENTION: the engine drafts for one batch on all stages"
        yield Infeasibility(text, ({"dp_attention": 1}, {"speculative": "off"}))
    yield from _flags(constraints, _PIPELINE, f"PP={pp}", _ONE_STAGE)


def _flags(
    constraints: Constraints,
    table: dict[str, tuple[tuple[str, ...], str]],
    what: str,
    ways: tuple[Mapping[str, Any], ...],
) -> Iterator[Infeasibility]:
    for given in constraints.given:
        allowed, _ = table.get(given.flag.dest, (None, ""))
        if allowed is not None and str(given.value) not in allowed:
            name = given.tokens[0]
            yield Infeasibility(f"{name} in ENGINE_ARGS: the engine refuses it with {what}", ({name: None}, *ways))


def microbatch(constraints: Constraints, requests: int, parallel: Parallel) -> int:
    """The largest decode batch of one rank: each of ``pp`` batches in flight holds its part of the running requests
    (managers/scheduler.py: pp_max_micro_batch_size)."""
    if parallel.pp == 1:
        return requests
    asked = str(constraints.engine_arg("pp_max_micro_batch_size") or "")
    return max(1, int(asked) if asked.isdecimal() and int(asked) else requests // parallel.pp)


def partition(constraints: Constraints, g: Geometry, pp: int) -> tuple[tuple[int, ...], Infeasibility | None]:
    """The layers of each stage that SGLANG_PP_LAYER_PARTITION asks for (distributed/utils.py:get_pp_indices);
    empty where it asks for nothing, or for something that cannot be."""
    text = constraints.engine_env(PARTITION)
    if not text or pp < 2:
        return (), None
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) == pp and sum(sizes) == g.layers and min(sizes) > 0:
        return sizes, None
    even = tuple(g.layers // pp + (stage >= pp - g.layers % pp) for stage in range(pp))
    wanted = f"{pp} stages of the model's {g.layers} layers are written as {','.join(map(str, even))}"
    return (), Infeasibility(f"{PARTITION}={text[:60]} cannot be: {wanted}")
