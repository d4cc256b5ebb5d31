# docker build -t lcs .                                   CUDA build of torch, also runs without a GPU
# docker build -t lcs --build-arg TORCH=cpu .             CPU build of torch, several GB smaller
#
# docker run -p 7860:7860 lcs                             the app, on http://localhost:7860
# docker run --gpus all lcs artifact                      every table and figure, into /out
# docker run --gpus all lcs train grid-all --scale mini   any verb of `python -m lcs`
#
# Results go to /out, the working directory. To keep them, mount a folder that exists and run as yourself,
# whatever your uid; the home folder, /out and the weights are writable for every user:
#   mkdir -p out && docker run --user "$(id -u):$(id -g)" -v "$PWD/out:/out" lcs artifact
FROM python:3.11-slim-bookworm

# cuda: as plain pip resolves it; cpu: torch comes from the index of CPU wheels, everything else as before.
ARG TORCH=cuda
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

RUN useradd --uid 1000 --create-home --home-dir /home/lcs lcs \
    && mkdir /out \
    && chown lcs:lcs /out \
    && chmod 0777 /out /home/lcs

# The slow layer: it is built again only if the pinned set changes.
COPY requirements.txt /app/
RUN case "$TORCH" in \
      cpu) pip install --no-cache-dir --root-user-action=ignore \
             --index-url "$TORCH_CPU_INDEX" "$(grep '^torch==' /app/requirements.txt)" ;; \
      cuda) ;; \
      *) echo "TORCH is '$TORCH'; choose cpu or cuda" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --root-user-action=ignore -r /app/requirements.txt

# What changes often comes last; .dockerignore lists what is taken.
COPY . /app/
RUN python -m compileall -q /app/lcs /app/artifact && mkdir -p /app/weights && chmod 0777 /app/weights

# PYTHONSAFEPATH: nothing that lies in the mounted folder is imported. USER: libraries ask for a name even
# where the uid has none.
ENV HOME=/home/lcs \
    USER=lcs \
    XDG_CACHE_HOME=/home/lcs/.cache \
    HF_HOME=/home/lcs/.cache/huggingface \
    MPLCONFIGDIR=/home/lcs/.cache/matplotlib \
    LCS_OUT=/out \
    PYTHONPATH=/app \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GRADIO_SERVER_NAME=0.0.0.0 \
    GRADIO_SERVER_PORT=7860 \
    GRADIO_ANALYTICS_ENABLED=False \
    GRADIO_TEMP_DIR=/home/lcs/.cache/gradio

USER 1000
WORKDIR /out
EXPOSE 7860

# The app must answer; every other verb is healthy as long as it runs.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import pathlib, urllib.request as u; b'app' in pathlib.Path('/proc/1/cmdline').read_bytes().split(b'\\0') and u.urlopen('http://127.0.0.1:7860/', timeout=8)"]

ENTRYPOINT ["python", "-m", "lcs"]
CMD ["app"]
