# The `gemini` command in an image. docs/containers.md says how to run it: with which volume, limits and profile.
#
#   docker build -t gemini-runtime --build-arg TORCH_INDEX=INDEX .     torch without CUDA, where INDEX has the CPU wheels
#   docker build -t gemini-runtime .                                   torch with CUDA: several GB more
#
# The core is compiled in a first stage, so that the image has no compiler. torch.compile needs one: add g++ below.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ liburing-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/gemini
ARG TORCH_INDEX=""
ENV PIP_EXTRA_INDEX_URL=${TORCH_INDEX} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY CMakeLists.txt LICENSE README.md constraints.txt pyproject.toml setup.py ./
COPY csrc csrc
COPY gemini gemini
COPY parallel parallel
RUN /opt/gemini/bin/pip install -c constraints.txt ".[hf]"

FROM ${BASE}
COPY --from=build /opt/gemini /opt/gemini
ENV PATH=/opt/gemini/bin:${PATH}
# Some bases have a user with this number already.
RUN useradd --uid 1000 --non-unique --create-home gemini && install -d -o gemini /scratch
USER gemini
WORKDIR /scratch
ENTRYPOINT ["gemini"]
CMD ["check"]
