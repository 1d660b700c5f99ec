"""Recomputes data/stereo/calibration.toml from the chessboard pairs beside it.

Needs opencv-python and numpy. The board is OpenCV's 9x6 pattern; lengths are in units of one square.
"""
import glob
import pathlib

import cv2
import numpy as np

here = pathlib.Path(__file__).parent / "stereo"
board = np.zeros((54, 3), np.float32)
board[:, :2] = np.mgrid[0:9, 0:6].T.reshape(-1, 2)
world, left, right = [], [], []
for name in sorted(glob.glob(str(here / "left*.jpg"))):
    pair = [cv2.imread(name, 0), cv2.imread(name.replace("left", "right"), 0)]
    found = [cv2.findChessboardCorners(i, (9, 6)) for i in pair]
    if not all(ok for ok, _ in found):
        print("no board in", name)
        continue
    stop = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_MAX_ITER, 30, 0.01)
    points = [cv2.cornerSubPix(i, c, (11, 11), (-1, -1), stop) for i, (_, c) in zip(pair, found)]
    world.append(board)
    left.append(points[0])
    right.append(points[1])

size = pair[0].shape[::-1]
kl = cv2.initCameraMatrix2D(world, left, size)
kr = cv2.initCameraMatrix2D(world, right, size)
flags = cv2.CALIB_FIX_ASPECT_RATIO | cv2.CALIB_ZERO_TANGENT_DIST | cv2.CALIB_USE_INTRINSIC_GUESS
rms, kl, dl, kr, dr, r, t, _, _ = cv2.stereoCalibrate(
    world, left, right, kl, None, kr, None, size, flags=flags,
    criteria=(cv2.TERM_CRITERIA_COUNT + cv2.TERM_CRITERIA_EPS, 100, 1e-5))
r1, r2, p1, p2, q, _, _ = cv2.stereoRectify(kl, dl, kr, dr, size, r, t, alpha=0)


def row(name, m):
    return f"{name} = [{', '.join(repr(float(v)) for v in np.asarray(m).ravel())}]\n"


with open(here / "calibration.toml", "w") as f:
    f.write("# Computed by data/calibrate.py (OpenCV stereoCalibrate and stereoRectify) from the pairs in this folder.\n")
    f.write("# Lengths are in chessboard squares, angles in radians, image positions in pixels.\n")
    f.write(f"rms_px = {rms:.4f}\nsize = [{size[0]}, {size[1]}]\nbaseline = {abs(float(t[0][0])):.6f}\n")
    for side, k, d, rot, p in (("left", kl, dl, r1, p1), ("right", kr, dr, r2, p2)):
        f.write(f"\n[{side}]\n")
        f.write("# 3x3 camera matrix, distortion k1 k2 p1 p2 k3, 3x3 rectifying rotation, 3x4 rectified projection; row-major\n")
        f.write(row("camera", k) + row("distortion", d) + row("rotation", rot) + row("projection", p))
print("rms", rms)
print("projection\n", p1, p2)
