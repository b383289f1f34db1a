"""OCI layouts of the same layers in several forms, for a test that compares what umoci and uvfs make of them.

Usage: images.py OUT ARCHITECTURE. Prints for each directory in OUT its name, and if it is to be refused a part of the
reason.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile

out, architecture = sys.argv[1], sys.argv[2]
OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"


def layer(*members):
    """Members: a path with a slash for a directory, and contents, or a target and the type of a link."""
    to = io.BytesIO()
    with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for i, (name, contents, *more) in enumerate(members):
            member = tarfile.TarInfo(name.rstrip("/"))
            member.mtime, member.uid, member.gid, member.mode = 1500000000 + i, i, 2 * i, 0o644
            if name.endswith("/"):
                member.type, member.mode = tarfile.DIRTYPE, 0o750
            elif more:
                member.type, member.linkname, member.mode = more[0], contents, 0o777
            else:
                contents = contents.encode()
                member.size = len(contents)
            if not more and i % 3 == 0:
                member.pax_headers = {"SCHILY.xattr.user.number": str(i)}
            tar.addfile(member, io.BytesIO(contents) if member.isreg() else None)
    return to.getvalue()


LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
LAYERS = [
    layer(("etc/", ""), ("etc/passwd", "root"), ("etc/conf.d/", ""), *((f"etc/conf.d/{n}", n) for n in "abcde"),
          ("usr/", ""), ("usr/lib/", ""), ("usr/lib/x.so", "x"), ("lib", "usr/lib", LINK), ("absolute", "/usr/lib", LINK),
          ("var/", ""), ("var/cache/", ""), ("var/cache/sub/", ""), *((f"var/cache/sub/{i}", "i") for i in range(5)),
          ("opt/", ""), ("opt/app/", ""), ("opt/app/file", "app"), ("one", "links"), ("two", "one", HARD),
          ("turns-directory", "file"), ("turns-file/", ""), ("turns-file/below", "gone"), ("turns-link/", ""),
          ("link-turns/", ""), ("to-nothing", "none", LINK), ("localtime", "/usr/lib/x.so", LINK), ("a/", ""), ("a/b/", ""),
          ("a/b/gone", ""),
          # Reports: A3S-Lab/Box 78, stereoscope 694, go-containerregistry 977.
          ("hard-over/", ""), ("hard-over/below", "gone"), ("target/", ""), ("target/keep", "kept"), ("through", "target", LINK),
          ("into", "target", LINK), ("target/white", "gone"), ("link-over/", ""), ("link-over/below", "gone"),
          (".wh.nothing-below", ""), ("white-directory/", "")),
    layer(("etc/", ""), ("etc/passwd", "other"), ("etc/conf.d/", ""), ("etc/conf.d/.wh.a", ""), ("etc/conf.d/.wh.none", ""),
          ("etc/conf.d/f", "new"), ("var/", ""), ("var/cache/", ""), ("var/cache/.wh..wh..opq", ""), ("var/cache/new", "1"),
          ("opt/", ""), ("opt/.wh.app", ""), ("lib/y.so", "y"), ("absolute/z.so", "z"), (".wh.one", ""),
          ("turns-directory/", ""), ("turns-directory/below", "new"), ("turns-file", "file"),
          ("hard-over", "two", HARD), ("through/", ""), ("through/.wh..wh..opq", ""), ("through/new", "new"),
          ("into/.wh.white", ""), ("link-over", "target", LINK), (".wh.white-directory/", ""),
          ("link-turns", "target", LINK)),
    layer(("opt/", ""), ("opt/app/", ""), ("opt/app/again", "again"), ("etc/", ""), ("etc/conf.d/", ""),
          ("etc/conf.d/kept", "before"), ("etc/conf.d/.wh..wh..opq", ""), ("three", "two", HARD), (".wh.to-nothing", ""), (".wh.localtime", ""),
          ("a/.wh.b", ""), ("a/b/", ""), ("a/b/c", "again"), ("new/parents/hard", "two", HARD),
          ("empty/", "")),
]


def sha(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Layout:
    """A layout in a directory."""

    def __init__(self, name, refused=""):
        self.at = os.path.join(out, name)
        os.makedirs(os.path.join(self.at, "blobs/sha256"))
        self.write("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        print(f"{name}\t{refused}")

    def write(self, name, data):
        with open(os.path.join(self.at, name), "wb") as file:
            file.write(data)

    def blob(self, data, media, **more):
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.write("blobs/sha256/" + sha(data)[7:], data)
        return {"mediaType": media, "digest": sha(data), "size": len(data), **more}

    def image(self, layers=LAYERS, kind=OCI, **more):
        docker = kind == DOCKER
        config = {"architecture": architecture, "os": "linux", "config": {},
                  "rootfs": {"type": "layers", "diff_ids": [sha(l) for l in layers]}}
        tar = f"{DOCKER}.image.rootfs.diff.tar" if docker else f"{OCI}.layer.v1.tar"
        described = [self.blob(gzip.compress(l, mtime=0), tar + (".gzip" if docker else "+gzip")) if i != 1
                     else self.blob(l, tar) for i, l in enumerate(layers)]
        manifest = {
            "schemaVersion": 2, "layers": described,
            "config": self.blob(config, f"{DOCKER}.container.image.v1+json" if docker else f"{OCI}.config.v1+json"),
        }
        media = f"{DOCKER}.distribution.manifest.v2+json" if docker else f"{OCI}.manifest.v1+json"
        return self.blob({**manifest, "mediaType": media}, media, **more)

    def index(self, *manifests):
        self.write("index.json", json.dumps({"schemaVersion": 2, "manifests": manifests}).encode())


def named(name):
    return {"annotations": {"org.opencontainers.image.ref.name": name}}


def platform(name, **more):
    return {"platform": {"os": "linux", "architecture": name, **more}}


one = Layout("one")
one.index(one.image(**named("tag")))

it = Layout("docker")
it.index(it.image(kind=DOCKER))

other = [layer(("other", "platform"))]
it = Layout("platforms")
it.index(it.image(other, **platform("s390x")), it.image(**platform(architecture)),
         it.image(other, **platform("arm", variant="v7")),
         it.blob({}, f"{OCI}.manifest.v1+json", **platform("unknown"), annotations={"vnd.docker.reference.type": "attestation-manifest"}))

it = Layout("nested")
inner = {"schemaVersion": 2, "manifests": [it.image(other, **platform("riscv64")), it.image(**platform(architecture))]}
it.index(it.blob(inner, f"{OCI}.index.v1+json", **named("tag")))

it = Layout("one-foreign")
it.index(it.image(**platform("s390x")))

it = Layout("only-foreign", "linux/s390x, linux/arm/v7, and none for linux/" + architecture)
it.index(it.image(other, **platform("s390x")), it.image(**platform("arm", variant="v7")))

it = Layout("several", "several images: first, second")
it.index(it.image(other, **named("first")), it.image(**named("second")))

it = Layout("none", "no image")
it.index()

it = Layout("artifact", "no tar archive")
it.index(it.blob({"layers": [it.blob(b"{}", "application/vnd.oci.empty.v1+json")]}, f"{OCI}.manifest.v1+json"))

it = Layout("leads-out", "is not one of SHA-256")
it.index({"mediaType": f"{OCI}.manifest.v1+json", "digest": "sha256:../../one/index.json", "size": 1})

for name, refused in [("damaged", "damaged"), ("cut-off", "damaged"), ("missing", "missing"), ("no-json", "JSON")]:
    print(f"{name}\t{refused}")
    shutil.copytree(one.at, os.path.join(out, name))
    blob = os.path.join(out, name, "blobs/sha256", sha(gzip.compress(LAYERS[2], mtime=0))[7:])
    data = bytearray(open(blob, "rb").read())
    if name == "missing":
        os.remove(blob)
    elif name == "no-json":
        open(os.path.join(out, name, "index.json"), "w").write("[")
    elif name == "damaged":
        # The decoder does not look at the name of a file.
        data[3:4], data[10:10] = b"\x08", b"name\0"
        open(blob, "wb").write(data)
    else:
        open(blob, "wb").write(data[:-9])

# As Docker saved images until version 25: a layer that is there twice is a link.
os.makedirs(os.path.join(out, "saved/abc"))
os.makedirs(os.path.join(out, "saved/def"))
open(os.path.join(out, "saved/abc/layer.tar"), "wb").write(LAYERS[0])
open(os.path.join(out, "saved/def/layer.tar"), "wb").write(LAYERS[1])
open(os.path.join(out, "saved/third.tar"), "wb").write(LAYERS[2])
os.symlink("../third.tar", os.path.join(out, "saved/def/link.tar"))
saved = {"Config": "config.json", "RepoTags": ["a:latest"], "Layers": ["abc/layer.tar", "def/layer.tar", "def/link.tar"]}
for name, images, refused in [
    ("saved", [saved], ""), ("saved-two", [saved, {**saved, "RepoTags": None}], "a:latest, one without a name"),
    ("saved-none", [{**saved, "Layers": ["none"]}], "missing"),
    ("saved-empty", [{**saved, "Layers": [""]}], "missing"), ("saved-out", [{**saved, "Layers": ["../one"]}], "missing"),
]:
    open(os.path.join(out, "saved/manifest.json"), "w").write(json.dumps(images))
    with tarfile.open(os.path.join(out, name + ".tar"), "w") as tar:
        tar.add(os.path.join(out, "saved"), ".")
    print(f"{name}.tar\t{refused}")
    if name == "saved":
        packed = gzip.compress(open(os.path.join(out, name + ".tar"), "rb").read())
        open(os.path.join(out, "saved.tar.gz"), "wb").write(packed)
        print("saved.tar.gz\t")
for i, data in enumerate(LAYERS):
    open(os.path.join(out, f"layer-{i}"), "wb").write(data)
