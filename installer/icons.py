"""Draws the program's icon in the forms that systems want: PNG, ICO (Windows), ICNS (macOS).

python installer/icons.py FOLDER
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "assets" / "icons" / "inglenook.svg"
ICO_SIZES = (16, 24, 32, 48, 64, 128, 256)
ICNS_KINDS = {b"ic11": 32, b"ic12": 64, b"ic07": 128, b"ic08": 256, b"ic09": 512, b"ic10": 1024}
PNG_SIZES = (48, 128, 256)


def draw(sizes: set[int]) -> dict[int, bytes]:
    """The icon as a PNG file of each size, in pixels."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    from PySide6.QtCore import QBuffer, QIODevice
    from PySide6.QtGui import QGuiApplication, QImage, QPainter
    from PySide6.QtSvg import QSvgRenderer

    application = QGuiApplication([])
    renderer = QSvgRenderer(str(SOURCE))
    drawn = {}
    for size in sizes:
        image = QImage(size, size, QImage.Format.Format_ARGB32)
        image.fill(0)
        painter = QPainter(image)
        renderer.render(painter)
        painter.end()
        buffer = QBuffer()
        buffer.open(QIODevice.OpenModeFlag.WriteOnly)
        if not image.save(buffer, "PNG"):  # type: ignore[call-overload]
            sys.exit("the icon could not be drawn")
        drawn[size] = bytes(buffer.data().data())
    application.quit()
    return drawn


def ico(pictures: dict[int, bytes]) -> bytes:
    """A file of Windows icons: a directory of sizes, then PNG files."""
    place = 6 + 16 * len(ICO_SIZES)
    directory, content = struct.pack("<HHH", 0, 1, len(ICO_SIZES)), b""
    for size in ICO_SIZES:
        side, picture = size % 256, pictures[size]  # 256 is written as 0
        directory += struct.pack("<BBBBHHII", side, side, 0, 0, 1, 32, len(picture), place + len(content))
        content += picture
    return directory + content


def icns(pictures: dict[int, bytes]) -> bytes:
    """A file of macOS icons: kinds, each with its length and a PNG file."""
    content = b"".join(
        kind + struct.pack(">I", 8 + len(pictures[size])) + pictures[size] for kind, size in ICNS_KINDS.items()
    )
    return b"icns" + struct.pack(">I", 8 + len(content)) + content


def main() -> None:
    """Write `inglenook.ico`, `inglenook.icns` and `inglenook-SIZE.png` to the folder named as argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw({*ICO_SIZES, *ICNS_KINDS.values(), *PNG_SIZES})
    (folder / "inglenook.ico").write_bytes(ico(pictures))
    (folder / "inglenook.icns").write_bytes(icns(pictures))
    for size in PNG_SIZES:
        (folder / f"inglenook-{size}.png").write_bytes(pictures[size])


if __name__ == "__main__":
    main()
