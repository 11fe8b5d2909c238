"""Settings, each declared once: type, range, step, unit, description, default.

Command-line flags, HTTP checks, sliders and the manual's tables are made from
these models. Nothing here knows where a value is shown or stored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import SettingError

__all__ = [
    "Conversion",
    "EngineSettings",
    "KvDtype",
    "Level",
    "LoadMode",
    "Sampling",
    "SchedulingPolicy",
    "ServerSettings",
    "Speculation",
    "Tier",
    "checked",
]

SchedulingPolicy = Literal["first-come", "shortest-remaining"]
KvDtype = Literal["int8", "f16", "f32"]
Level = Literal["plain", "small", "balanced", "best", "attention"]
LoadMode = Literal["auto", "mmap", "resident", "stream"]
Speculation = Literal["off", "ngram", "draft"]
Tier = Literal["generic", "avx2", "avxvnni", "avx512vnni", "amx"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Sampling(_Settings):
    """How the next token is drawn.

    Order: repetition, presence and frequency penalties, temperature, top-k,
    top-p, min-p, typical-p; then one draw.
    """

    temperature: Annotated[
        float,
        Field(
            ge=0,
            le=2,
            title="Temperature",
            description="0 always takes the likeliest token; higher varies more.",
            json_schema_extra={"step": 0.05},
        ),
    ] = 0.7
    top_k: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            title="Top-k",
            description="Draw among the k likeliest tokens only; 0 switches this off.",
            json_schema_extra={"step": 1},
        ),
    ] = 40
    top_p: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            title="Top-p",
            description="Draw among the likeliest tokens that together reach this probability; 1 switches this off.",
            json_schema_extra={"step": 0.01},
        ),
    ] = 0.9
    min_p: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            title="Min-p",
            description="Drop tokens less likely than this share of the likeliest; 0 switches this off.",
            json_schema_extra={"step": 0.01},
        ),
    ] = 0.05
    typical_p: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            title="Typical-p",
            description="Keep tokens of typical surprise up to this probability; 1 switches this off.",
            json_schema_extra={"step": 0.01, "advanced": True},
        ),
    ] = 1.0
    repetition_penalty: Annotated[
        float,
        Field(
            ge=0.1,
            le=2,
            title="Repetition penalty",
            description="Above 1 makes tokens that already occurred less likely; 1 switches this off.",
            json_schema_extra={"step": 0.01},
        ),
    ] = 1.05
    repetition_window: Annotated[
        int,
        Field(
            ge=0,
            le=4096,
            title="Repetition window",
            description="How many of the latest tokens the penalties look at; 0 looks at none.",
            json_schema_extra={"step": 16, "unit": "tokens", "advanced": True},
        ),
    ] = 256
    presence_penalty: Annotated[
        float,
        Field(
            ge=-2,
            le=2,
            title="Presence penalty",
            description="Lowers every token that occurred in the window by this much, once.",
            json_schema_extra={"step": 0.05, "advanced": True},
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Field(
            ge=-2,
            le=2,
            title="Frequency penalty",
            description="Lowers a token by this much for each time it occurred in the window.",
            json_schema_extra={"step": 0.05, "advanced": True},
        ),
    ] = 0.0
    max_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            title="Longest answer",
            description="The answer ends after this many tokens.",
            json_schema_extra={"step": 64, "unit": "tokens"},
        ),
    ] = 2048
    loop_limit: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            title="Repetition limit",
            description="An answer that has only repeated itself for so many tokens ends; 0 lets it go on.",
            json_schema_extra={"step": 64, "unit": "tokens", "advanced": True},
        ),
    ] = 512
    seed: Annotated[
        int,
        Field(
            ge=-1,
            le=2**63 - 1,
            title="Seed",
            description="The same seed repeats the same answer; -1 takes a new one each time.",
            json_schema_extra={"step": 1},
        ),
    ] = -1
    stop: Annotated[
        tuple[str, ...],
        Field(
            max_length=16,
            title="Stop texts",
            description="The answer ends before any of these texts; they are not shown.",
            json_schema_extra={"advanced": True},
        ),
    ] = ()


class EngineSettings(_Settings):
    """What a loaded model gets of the machine."""

    threads: Annotated[
        int,
        Field(ge=0, le=1024, title="CPU threads", description="0 uses every physical core this program may use."),
    ] = 0
    free_cores: Annotated[
        int,
        Field(ge=0, le=1023, title="Cores left free", description="Cores for other programs, while threads is 0."),
    ] = 0
    context: Annotated[
        int,
        Field(
            ge=0,
            le=10_000_000,
            title="Context length",
            description="Tokens a conversation can hold; 0 chooses what fits the memory.",
            json_schema_extra={"unit": "tokens"},
        ),
    ] = 0
    kv: Annotated[
        KvDtype,
        Field(
            title="KV cache precision",
            description="int8 needs half the memory of f16; f32 is for comparison with a reference.",
        ),
    ] = "int8"
    tier: Annotated[
        Tier | None,
        Field(
            title="Instruction tier",
            description="Which CPU instructions to use; empty takes the best this CPU has.",
        ),
    ] = None
    load: Annotated[
        LoadMode,
        Field(
            title="Load mode",
            description="mmap starts at once; resident copies the weights into memory first, which makes answers "
            "faster; auto does so where there is twice the room; stream is for models larger than the memory and reads "
            "what does not fit from disk for every token.",
        ),
    ] = "auto"
    max_batch_size: Annotated[
        int,
        Field(ge=1, le=256, title="Parallel answers", description="How many answers are computed together."),
    ] = 4
    speculation: Annotated[
        Speculation,
        Field(
            title="Speculation",
            description="Compute guesses of the next tokens along: ngram finds them earlier in the text, draft asks a "
            "small model. Answers stay the same and may come sooner.",
        ),
    ] = "ngram"
    draft: Annotated[
        str,
        Field(
            title="Draft model",
            description="A small model of the same vocabulary that makes the guesses; naming one chooses draft.",
        ),
    ] = ""
    draft_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            title="Most guesses",
            description="Guessed tokens of one step, of all answers together.",
            json_schema_extra={"unit": "tokens", "advanced": True},
        ),
    ] = 15
    scheduling: Annotated[
        SchedulingPolicy,
        Field(
            title="Order of requests",
            description="first-come keeps the order of arrival, shortest-remaining prefers what ends soonest; "
            "clients take turns in both.",
            json_schema_extra={"advanced": True},
        ),
    ] = "first-come"
    most_requests: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            title="Most requests",
            description="Requests on their way, waiting ones counted; further ones are refused. 0 sets no limit.",
            json_schema_extra={"advanced": True},
        ),
    ] = 0
    most_of_client: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            title="Most requests of a client",
            description="Requests of one client on their way at a time; 0 sets no limit.",
            json_schema_extra={"advanced": True},
        ),
    ] = 0
    most_request_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=10_000_000,
            title="Longest request",
            description="Tokens of a prompt and its answer together; 0 is the context.",
            json_schema_extra={"unit": "tokens", "advanced": True},
        ),
    ] = 0
    snapshot_mb: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            title="Conversations on disk",
            description="Room for what was read of conversations, so that they go on at once after a restart; "
            "0 keeps nothing.",
            json_schema_extra={"unit": "MB", "advanced": True},
        ),
    ] = 0
    prompt_slice_ms: Annotated[
        int,
        Field(
            ge=20,
            le=5000,
            title="Longest pause",
            description="How long running answers may pause while a part of a prompt is read.",
            json_schema_extra={"unit": "ms", "advanced": True},
        ),
    ] = 250


class Conversion(_Settings):
    """How a model folder becomes a `.nook` file."""

    level: Annotated[
        Level,
        Field(
            title="Level",
            description="small has 4 bits, balanced more where the model is sensitive, best 6, attention 8 there and 4 "
            "elsewhere; all are fitted to a sample text. plain follows bits and group size.",
        ),
    ] = "plain"

    bits: Annotated[
        Literal[4, 8, 16],
        Field(
            title="Bits",
            description="4 is smallest and fastest, 8 nearly lossless, 16 keeps the source's precision.",
        ),
    ] = 4
    group_size: Annotated[
        Literal[32, 64, 128, 256],
        Field(
            title="Group size",
            description="Weights that share one scale; smaller is more exact and larger on disk.",
        ),
    ] = 32
    keep: Annotated[
        tuple[str, ...],
        Field(
            title="Exceptions",
            description="PATTERN=q4|q6|q8|f16|f32, the last match wins; tensor names as `inspect --tensors` shows.",
        ),
    ] = ()
    calibrate: Annotated[
        str,
        Field(
            title="Sample text",
            description="A text file like what the model will read, to fit 4- and 6-bit weights to; levels have one of "
            "their own.",
        ),
    ] = ""
    budget: Annotated[
        float,
        Field(
            ge=0,
            title="Size budget",
            description="Up to 64 bits per weight, or bytes: what fits is chosen by measuring which weights need more "
            "bits than 4. 0 leaves it to the level.",
        ),
    ] = 0.0


class ServerSettings(_Settings):
    """How the HTTP server behaves."""

    host: Annotated[
        str,
        Field(
            min_length=1,
            title="Address",
            description="Where to listen; anything but this computer itself wants an API key.",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, title="Port", description="0 takes a free one.")] = 8765
    api_key: Annotated[
        tuple[str, ...],
        Field(
            title="API keys",
            description="Whoever shows one of these may ask; without any, everybody who reaches the address may. "
            "INGLENOOK_API_KEY in the environment is one, too.",
        ),
    ] = ()
    allow_host: Annotated[
        tuple[str, ...],
        Field(title="Names", description="Further names by which clients call this computer, such as pc.example."),
    ] = ()
    allow_origin: Annotated[
        tuple[str, ...],
        Field(title="Web pages", description="Web pages that may ask, such as https://chat.example; none by default."),
    ] = ()
    queue: Annotated[
        int,
        Field(ge=0, le=10_000, title="Queue", description="How many answers may wait; further ones are sent away."),
    ] = 64
    body_mb: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            title="Largest request",
            description="Megabytes of one request.",
            json_schema_extra={"unit": "MB"},
        ),
    ] = 16
    idle_minutes: Annotated[
        int,
        Field(
            ge=0,
            le=100_000,
            title="Unload after",
            description="Minutes without a request after which a model is unloaded; 0 keeps it.",
            json_schema_extra={"unit": "min"},
        ),
    ] = 30
    shutdown_s: Annotated[
        int,
        Field(
            ge=0,
            le=3600,
            title="Time to finish",
            description="Seconds that running answers get when the server is stopped.",
            json_schema_extra={"unit": "s"},
        ),
    ] = 10
    log_prompts: Annotated[
        bool, Field(title="Log prompts", description="Write what is asked and answered into the log.")
    ] = False


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], values: dict[str, Any], where: str = "") -> Model:
    """`model(**values)`, or one sentence that names the field, its range and the value.

    Raises:
        SettingError: `temperature must be between 0 and 2, not 2.5`
    """
    try:
        return model(**values)
    except ValidationError as error:
        raise SettingError(_sentence(model, error, where)) from None


def _sentence(model: type[BaseModel], error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else model.__name__
    place = f" ({where})" if where else ""
    if first["type"] == "extra_forbidden":
        return f"{name}{place} is not a setting of {model.__name__}"
    schema = model.model_json_schema()["properties"].get(name, {})
    low, high = schema.get("minimum"), schema.get("maximum")
    value = first.get("input")
    if low is not None and high is not None:
        return f"{name}{place} must be between {low} and {high}, not {value!r}"
    if "enum" in schema:
        return f"{name}{place} must be one of {', '.join(map(str, schema['enum']))}, not {value!r}"
    return f"{name}{place}: {first['msg'][0].lower()}{first['msg'][1:]}, not {value!r}"
