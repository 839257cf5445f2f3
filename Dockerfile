# Isles in a container: the versions of constraints.txt, and torch's small CPU build.
#
#   docker build -t isles .                                   # with CUDA: --build-arg TORCH_INDEX=
#   docker run --rm --init -v "$PWD:/work" --user "$(id -u):$(id -g)" isles train --data my.txt --out runs/my
#
# /work is the working directory; tokenised texts and keys are kept in /work/.isles. GPUs: docker run --gpus all.
# Several machines: docker run --network host. `docker stop -t 60` leaves workers the time to save a checkpoint.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
# Empty: the build that pip finds by itself, which on Linux brings several GB of CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Such as [data,hf].
ARG EXTRAS=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY isles /src/isles
RUN python3 -m venv /opt/isles
RUN /opt/isles/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} ".${EXTRAS}"

FROM python:${PYTHON}-slim
RUN useradd --create-home isles && mkdir /work && chown isles /work
COPY --from=build /opt/isles /opt/isles
ENV PATH=/opt/isles/bin:$PATH ISLES_HOME=/work/.isles
USER isles
WORKDIR /work
ENTRYPOINT ["isles"]
CMD ["--help"]
