; Makes the installer for Windows: makensis -DVERSION=... -DSOURCE=dist\Inglenook -DOUT=setup.exe installer\windows.nsi
; For one user, without an administrator; /S installs silently, /D=FOLDER (last) elsewhere.
Unicode true
Target amd64-unicode
SetCompressor /SOLID lzma
!include "MUI2.nsh"

Name "Inglenook"
OutFile "${OUT}"
RequestExecutionLevel user
InstallDir "$LOCALAPPDATA\Programs\Inglenook"
InstallDirRegKey HKCU "Software\Inglenook" "InstallDir"

VIProductVersion "${VERSION}.0"
VIAddVersionKey "ProductName" "Inglenook"
VIAddVersionKey "ProductVersion" "${VERSION}"
VIAddVersionKey "FileVersion" "${VERSION}"
VIAddVersionKey "FileDescription" "Installs Inglenook"
VIAddVersionKey "LegalCopyright" "Apache License 2.0"

!define MUI_ICON "..\build\inglenook\icons\inglenook.ico"
!define MUI_UNICON "..\build\inglenook\icons\inglenook.ico"
!insertmacro MUI_PAGE_DIRECTORY
!insertmacro MUI_PAGE_INSTFILES
!define MUI_FINISHPAGE_RUN "$INSTDIR\inglenook.exe"
!insertmacro MUI_PAGE_FINISH
!insertmacro MUI_UNPAGE_CONFIRM
!insertmacro MUI_UNPAGE_INSTFILES
!insertmacro MUI_LANGUAGE "English"
!insertmacro MUI_LANGUAGE "SimpChinese"

!define UNINSTALL "Software\Microsoft\Windows\CurrentVersion\Uninstall\Inglenook"

; What an earlier version left there would be loaded by the new one. People's data lies elsewhere and stays.
!macro RemoveProgram
  RMDir /r "$INSTDIR\_internal"
  RMDir /r "$INSTDIR\kernels"
  RMDir /r "$INSTDIR\models"
  RMDir /r "$INSTDIR\licences"
  RMDir /r "$INSTDIR\docs"
  Delete "$INSTDIR\inglenook.exe"
  Delete "$INSTDIR\inglenook-cli.exe"
  Delete "$INSTDIR\README.md"
  Delete "$INSTDIR\CHANGELOG.md"
!macroend

Section
  !insertmacro RemoveProgram
  SetOutPath "$INSTDIR"
  File /r "${SOURCE}\*.*"
  WriteUninstaller "$INSTDIR\uninstall.exe"
  CreateShortCut "$SMPROGRAMS\Inglenook.lnk" "$INSTDIR\inglenook.exe"
  CreateShortCut "$DESKTOP\Inglenook.lnk" "$INSTDIR\inglenook.exe"
  WriteRegStr HKCU "Software\Inglenook" "InstallDir" "$INSTDIR"
  WriteRegStr HKCU "${UNINSTALL}" "DisplayName" "Inglenook"
  WriteRegStr HKCU "${UNINSTALL}" "DisplayVersion" "${VERSION}"
  WriteRegStr HKCU "${UNINSTALL}" "DisplayIcon" "$INSTDIR\inglenook.exe"
  WriteRegStr HKCU "${UNINSTALL}" "UninstallString" '"$INSTDIR\uninstall.exe"'
  WriteRegStr HKCU "${UNINSTALL}" "QuietUninstallString" '"$INSTDIR\uninstall.exe" /S'
  WriteRegDWORD HKCU "${UNINSTALL}" "NoModify" 1
SectionEnd

Section "Uninstall"
  !insertmacro RemoveProgram
  Delete "$INSTDIR\uninstall.exe"
  RMDir "$INSTDIR"
  Delete "$SMPROGRAMS\Inglenook.lnk"
  Delete "$DESKTOP\Inglenook.lnk"
  DeleteRegKey HKCU "${UNINSTALL}"
  DeleteRegKey HKCU "Software\Inglenook"
SectionEnd
