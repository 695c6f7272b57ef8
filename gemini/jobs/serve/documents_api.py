"""The endpoint of EnergonAI's OPT service: ``/generation``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from gemini.jobs.serve.limits import while_connected
from gemini.jobs.serve.service import Query, Service, whole_of


class GenerationTask(BaseModel):
    """A text to continue. ``top_k``, ``top_p`` and ``temperature``: None draws from all tokens."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(default=64, ge=1)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    temperature: float | None = Field(default=None, gt=0)


class GeneratedText(BaseModel):
    """The prompt and its continuation."""

    text: str


def routes(service: Service) -> APIRouter:
    """Return the endpoint."""
    router = APIRouter()

    @router.post("/generation")
    async def generate(task: GenerationTask, request: Request) -> GeneratedText:
        """Continue a text."""
        query = Query(
            prompt=task.prompt,
            max_tokens=task.max_tokens,
            temperature=1.0 if task.temperature is None else task.temperature,
            top_k=task.top_k or 0,
            top_p=1.0 if task.top_p is None else task.top_p,
        )
        text, _ = await while_connected(request, whole_of(service.answer(query)))
        return GeneratedText(text=task.prompt + text)

    return router
