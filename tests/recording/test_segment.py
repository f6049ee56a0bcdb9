"""Segments as files: every filter keeps every byte, in whole chunks, in the format of HDF5 1.10."""

import shutil
import zlib

import h5py
import numpy as np
import pytest

from hpcrl.recording.segment import SegmentWriter, filter_arguments
from hpcrl.specs import ArraySpec

COLUMNS = {
    "observation/image": ArraySpec((60, 50), "uint8"),
    "observation/scan": ArraySpec((70,), "float32"),
    "observation/pose": ArraySpec((2,), "float64"),
    "action": ArraySpec((1,), "int32"),
    "reward": ArraySpec((), "float32"),
}
WIDE = {"observation/image", "observation/scan"}
ENTRY = {
    "return": 0.0,
    "env_id": 0,
    "episode": 0,
    "env_seed": 1,
    "evaluation": False,
    "complete": True,
    "terminated": True,
    "truncated": False,
    "first_policy_version": 0,
    "last_policy_version": 0,
    "end_unix_s": 0.0,
}


def random_steps(rng, count):
    """Bytes that no filter makes smaller, and half of them that every filter does."""
    steps = {}
    for name, spec in COLUMNS.items():
        dtype = np.dtype(spec.dtype)
        raw = rng.integers(0, 100, (count, *spec.shape))
        steps[name] = (raw * rng.integers(0, 2)).astype(dtype)
    return steps


def pieces_of(steps):
    """The same rows in an empty piece, one row, and the rest."""
    return {name: [rows[:0], rows[:1], rows[1:]] for name, rows in steps.items()}


def random_pieces(rng, count):
    return pieces_of(random_steps(rng, count))


def write(path, compression, lengths, **options):
    """A closed segment with episodes of these lengths; returns what was written, by column."""
    rng = np.random.default_rng(3)
    writer = SegmentWriter(path, COLUMNS, {}, compression, **options)
    episodes = [random_steps(rng, length) for length in lengths]
    for number, steps in enumerate(episodes):
        writer.append(pieces_of(steps), None, {**ENTRY, "episode": number})
    writer.close("finished", {})
    return {name: np.concatenate([steps[name] for steps in episodes]) for name in COLUMNS}


@pytest.mark.parametrize("compression", ["gzip-1", "gzip-4", "gzip-9", "lzf", "none"])
@pytest.mark.parametrize("lengths", [[1], [64], [3, 200, 1, 61], [500, 500]], ids=str)
def test_every_filter_gives_back_every_byte(tmp_path, compression, lengths):
    path = tmp_path / "seg-00000.h5"
    ticks = iter(range(1000))
    written = write(path, compression, lengths, clock=lambda: next(ticks) * 0.4)
    with h5py.File(path) as file:
        for name, rows in written.items():
            dataset = file[f"steps/{name}"]
            np.testing.assert_array_equal(dataset[:], rows, strict=True)
            arguments = filter_arguments(compression) if name in WIDE else {}
            assert dataset.compression == arguments.get("compression")
            assert dataset.compression_opts == arguments.get("compression_opts")
            if dataset.compression == "gzip":  # the last chunk is whole, too
                for number in range(dataset.id.get_num_chunks()):
                    place = dataset.id.get_chunk_info(number).chunk_offset
                    _, data = dataset.id.read_direct_chunk(place)
                    size = np.prod(dataset.chunks) * dataset.dtype.itemsize
                    assert len(zlib.decompress(data)) == size
            assert dataset.chunks[1:] == COLUMNS[name].shape  # whole frames
        assert file["episodes/length"][:].tolist() == lengths
        assert file["episodes/start"][:].tolist() == np.cumsum([0, *lengths[:-1]]).tolist()


def test_gzip_1_is_read_the_same_where_isal_is_missing(tmp_path, monkeypatch):
    with_isal = write(tmp_path / "seg-00000.h5", "gzip-1", [300])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write(tmp_path / "seg-00001.h5", "gzip-1", [300])
    for number in range(2):
        with h5py.File(tmp_path / f"seg-0000{number}.h5") as file:
            for name, rows in with_isal.items():
                np.testing.assert_array_equal(file[f"steps/{name}"][:], rows)


def test_an_open_segment_holds_whole_chunks_only(tmp_path):
    moment = 0.0
    writer = SegmentWriter(tmp_path / "seg-00000.h5", COLUMNS, {}, "gzip-1", clock=lambda: moment)
    rng = np.random.default_rng(0)
    writer.append(random_pieces(rng, 150), None, ENTRY)
    assert (writer.flushed_steps, writer.flushed_episodes) == (0, 0)
    moment = 1.0
    writer.append(random_pieces(rng, 10), None, {**ENTRY, "episode": 1})
    copy = shutil.copy(writer.partial, tmp_path / "copy.h5")
    with h5py.File(copy, "r", swmr=True) as file:
        image = file["steps/observation/image"]
        assert image.chunks[0] == 64
        assert image.id.get_num_chunks() == 2
        assert len(image) == writer.flushed_steps == 128
        assert len(file["episodes/start"]) == writer.flushed_episodes == 0
        assert not file.attrs["closed"]
    assert writer.pending_bytes == (160 - 128) * sum(spec.nbytes for spec in COLUMNS.values())
    moment = 2.0
    writer.append(random_pieces(rng, 40), None, {**ENTRY, "episode": 2})
    assert (writer.flushed_steps, writer.flushed_episodes) == (192, 2)


def test_an_open_segment_without_wide_columns_holds_all_that_is_a_second_old(tmp_path):
    """Nothing is compressed, so nothing has to wait for its chunk."""
    columns = {"observation/pose": ArraySpec((2,), "float64"), "reward": ArraySpec((), "float32")}
    moment = 0.0
    path = tmp_path / "seg-00000.h5"
    writer = SegmentWriter(path, columns, {}, "gzip-1", clock=lambda: moment)
    rng, lengths, flushed = np.random.default_rng(0), [5, 1, 4100, 30, 7], []
    poses = rng.random((sum(lengths), 2))
    for number, length in enumerate(lengths):
        first, moment = sum(lengths[:number]), number * 0.6
        steps = {
            "observation/pose": [poses[first : first + length]],
            "reward": [np.ones(length, np.float32)],
        }
        writer.append(steps, None, {**ENTRY, "episode": number})
        flushed.append((writer.flushed_episodes, writer.flushed_steps))
        copy = shutil.copy(writer.partial, tmp_path / "copy.h5")
        with h5py.File(copy, "r", swmr=True) as file:
            np.testing.assert_array_equal(
                file["steps/observation/pose"][:], poses[: flushed[-1][1]]
            )
            assert file["episodes/length"][:].tolist() == lengths[: flushed[-1][0]]
    assert flushed == [(0, 0), (0, 0), (3, 4106), (3, 4106), (5, 4143)]


def test_the_format_is_bounded_by_that_of_hdf5_1_10(tmp_path):
    writer = SegmentWriter(tmp_path / "seg-00000.h5", COLUMNS, {}, "gzip-1")
    assert writer._file.libver == ("v110", "v110")
    writer.close("finished", {})


def test_a_segment_is_never_written_over(tmp_path):
    path = tmp_path / "seg-00000.h5"
    write(path, "none", [5])
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="exists"):
        SegmentWriter(path, COLUMNS, {}, "none")
    assert path.read_bytes() == before
